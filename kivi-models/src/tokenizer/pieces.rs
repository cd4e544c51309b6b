//! The bytes of every token.

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One printable character per byte, as in GPT-2.
    ByteLevel,
    /// Plain text with `▁` for a space, and `<0x0A>` for a byte that is no character.
    SentencePiece {
        /// Whether a space is put before the text when it is encoded and dropped when decoded.
        leading_space: bool,
    },
}

/// A token's bytes and its kind.
struct Piece {
    bytes: Box<[u8]>,
    special: bool,
}

/// All tokens by id.
pub(super) struct Pieces {
    pieces: Vec<Option<Piece>>,
    pub(super) strip_leading_space: bool,
    /// Bytes that no token of a byte-level vocabulary spells; `None` when there are none.
    missing: Option<Box<[bool; 256]>>,
}

impl Pieces {
    /// `vocab` and `added` are `(token, id)`, the latter with whether the token is special. The ids
    /// are distinct and bounded.
    pub(super) fn new<'a>(
        spelling: Spelling,
        vocab: impl Iterator<Item = (&'a str, u32)>,
        added: impl Iterator<Item = (&'a str, u32, bool)>,
    ) -> Self {
        let bytes_of = byte_level_alphabet();
        let mut pieces = Vec::new();
        let mut missing = Box::new([spelling == Spelling::ByteLevel; 256]);
        let mut put = |id: u32, bytes: Vec<u8>, special| {
            let index = id as usize;
            if pieces.len() <= index {
                pieces.resize_with(index + 1, || None);
            }
            pieces[index] = Some(Piece { bytes: bytes.into(), special });
        };
        for (token, id) in vocab {
            let bytes = match spelling {
                Spelling::ByteLevel => byte_level(token, &bytes_of),
                Spelling::SentencePiece { .. } => sentencepiece(token),
            };
            if let [byte] = bytes[..] {
                missing[usize::from(byte)] = false;
            }
            put(id, bytes, false);
        }
        for (token, id, special) in added {
            // Added tokens are spelled as text; only SentencePiece's mark for a space counts.
            let bytes = match spelling {
                Spelling::ByteLevel => token.as_bytes().to_vec(),
                Spelling::SentencePiece { .. } => token.replace('▁', " ").into_bytes(),
            };
            put(id, bytes, special);
        }
        let strip_leading_space = spelling == Spelling::SentencePiece { leading_space: true };
        let missing = missing.contains(&true).then_some(missing);
        Self { pieces, strip_leading_space, missing }
    }

    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        Some(&self.get(id)?.bytes)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.get(id).is_some_and(|piece| piece.special)
    }

    pub(super) fn special_ids(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.pieces).filter(|(_, p)| p.as_ref().is_some_and(|p| p.special)).map(|p| p.0)
    }

    /// The first byte of `text` that the vocabulary cannot spell.
    pub(super) fn first_missing_byte(&self, text: &[u8]) -> Option<u8> {
        let missing = self.missing.as_ref()?;
        text.iter().copied().find(|&byte| missing[usize::from(byte)])
    }

    fn get(&self, id: u32) -> Option<&Piece> {
        self.pieces.get(id as usize)?.as_ref()
    }
}

/// The byte that each of the characters below U+0144 spells, if it does: a byte is spelled as
/// itself where it is printable and not a space in Latin-1, else as the next of U+0100, U+0101 …
/// (GPT-2's `bytes_to_unicode`).
fn byte_level_alphabet() -> [Option<u8>; 0x144] {
    let mut alphabet = [None; 0x144];
    let mut others = 0x100..0x144;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let spelled = if printable { Some(usize::from(byte)) } else { others.next() };
        // 188 bytes are printable, 68 are not.
        if let Some(entry) = spelled.and_then(|char| alphabet.get_mut(char)) {
            *entry = Some(byte);
        }
    }
    alphabet
}

/// Bytes of a byte-level token; one that is not spelled in the alphabet is plain text.
fn byte_level(token: &str, alphabet: &[Option<u8>]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for char in token.chars() {
        match alphabet.get(char as usize) {
            Some(&Some(byte)) => bytes.push(byte),
            _ => return token.as_bytes().to_vec(),
        }
    }
    bytes
}

/// Bytes of a SentencePiece token.
fn sentencepiece(token: &str) -> Vec<u8> {
    match byte_token(token) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

/// The byte that a token like `<0x0A>` stands for.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}
