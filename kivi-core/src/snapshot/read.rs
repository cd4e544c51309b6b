//! Reading a snapshot: nothing is allocated for bytes that have not arrived, and nothing is given
//! out before every checksum was compared.

use super::{MAGIC, Snapshot, SnapshotError, SnapshotHeader, VERSION, header};
use crate::{
    Bits, CanonicalLayer, Error, Format, FullTokens, KeyValue, LayerSpec, PackedKeys, PackedValues,
    PromotedKeys, Promotion, Result, StoreDtype, words_for,
};
use half::{bf16, f16};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

type Checked<T> = std::result::Result<T, SnapshotError>;

/// Bytes that are read, hashed and converted at once.
const CHUNK: usize = 1 << 16;

impl Snapshot {
    /// Reads and verifies a snapshot, to the end of the input.
    ///
    /// # Errors
    /// Any [`SnapshotError`] but those of another model or cache, which only
    /// [`Snapshot::check`] can tell.
    pub fn read_from(input: impl Read) -> Result<Self> {
        Ok(read(input)?)
    }

    /// Reads and verifies a file.
    ///
    /// # Errors
    /// As [`Snapshot::read_from`], with the file named.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        File::open(path).map_err(SnapshotError::read).and_then(read).map_err(|error| {
            let error = Box::new(error);
            Error::from(SnapshotError::InFile { path: path.to_owned(), error })
        })
    }
}

fn read(input: impl Read) -> Checked<Snapshot> {
    let mut input = Input { input, hash: Sha256::new(), part: String::new() };
    let mut header = input.header()?;
    input.part = "the token ids".into();
    header.0.tokens = input.array(header.1, u32::from_le_bytes)?;
    let header = header.0;
    // What is wrong with it and not only with the file, before the arrays are read.
    let (pool, layout) = header.shape().map_err(SnapshotError::invalid)?;
    let mut layers = Vec::with_capacity(header.layers.len());
    for index in 0..header.layers.len() {
        layers.push(input.layer(&header, index)?);
    }
    input.checksum("the checksum")?;
    if input.fill(&mut [0])? > 0 {
        return Err(SnapshotError::Damaged { reason: "bytes follow its end".into() });
    }
    let snapshot = Snapshot { header, layers };
    snapshot.check_shapes(&pool, &layout).map_err(SnapshotError::invalid)?;
    Ok(snapshot)
}

/// Reads and hashes.
struct Input<R> {
    input: R,
    hash: Sha256,
    /// What is being read, for messages.
    part: String,
}

impl<R: Read> Input<R> {
    /// Fills `bytes` as far as the input goes, and says how far.
    fn fill(&mut self, bytes: &mut [u8]) -> Checked<usize> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.input.read(&mut bytes[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(SnapshotError::read(error)),
            }
        }
        Ok(filled)
    }

    fn exactly(&mut self, bytes: &mut [u8]) -> Checked<()> {
        let found = self.fill(bytes)?;
        self.complete(bytes.len() as u64, found as u64)?;
        self.hash.update(bytes);
        Ok(())
    }

    fn complete(&self, needed: u64, found: u64) -> Checked<()> {
        if found < needed {
            let part = self.part.clone();
            return Err(SnapshotError::Truncated { part, needed, found });
        }
        Ok(())
    }

    /// A short field.
    fn field<const N: usize>(&mut self, part: &str) -> Checked<[u8; N]> {
        self.part = part.into();
        let mut bytes = [0; N];
        self.exactly(&mut bytes)?;
        Ok(bytes)
    }

    /// Compares the checksum of everything so far.
    fn checksum(&mut self, part: &str) -> Checked<()> {
        let expected: [u8; 32] = self.hash.clone().finalize().into();
        let found: [u8; 32] = self.field(part)?;
        if found != expected {
            let reason = format!(
                "{part} is {}, and that of the bytes before it {}",
                super::hex(&found),
                super::hex(&expected)
            );
            return Err(SnapshotError::Damaged { reason });
        }
        Ok(())
    }

    /// The header, and the number of token ids.
    fn header(&mut self) -> Checked<(SnapshotHeader, usize)> {
        let mut magic = [0; MAGIC.len()];
        let found = self.fill(&mut magic)?;
        if found == 0 {
            return Err(SnapshotError::NotASnapshot { reason: "there are no bytes".into() });
        }
        if magic[..found] != MAGIC[..found] {
            let reason = format!("it starts with {:02x?}, not with {MAGIC:02x?}", &magic[..found]);
            return Err(SnapshotError::NotASnapshot { reason });
        }
        self.part = "the signature".into();
        self.complete(MAGIC.len() as u64, found as u64)?;
        self.hash.update(magic);
        let version = u32::from_le_bytes(self.field("the version")?);
        if version != VERSION {
            return Err(SnapshotError::UnknownVersion { found: version, known: VERSION });
        }
        let length = u32::from_le_bytes(self.field("the length of the header")?);
        if length as usize > header::LONGEST {
            let reason =
                format!("a header of {length} bytes, and none is above {}", header::LONGEST);
            return Err(SnapshotError::Damaged { reason });
        }
        self.part = "the header".into();
        let bytes = self.array(length as usize, |[byte]: [u8; 1]| byte)?;
        self.checksum("the checksum of the header")?;
        header::decode(&bytes)
    }

    /// So many numbers, whose bytes are read bit by bit.
    fn array<T, const N: usize>(
        &mut self,
        count: usize,
        mut from_bytes: impl FnMut([u8; N]) -> T,
    ) -> Checked<Vec<T>> {
        let needed = (count as u64).checked_mul(N as u64);
        let needed = needed.ok_or_else(|| SnapshotError::invalid("an array beyond 2⁶⁴ bytes"))?;
        let mut elements = Vec::new();
        let mut chunk = vec![0; CHUNK.min(usize::try_from(needed).unwrap_or(CHUNK))];
        let mut read = 0;
        while read < needed {
            let length = usize::try_from(needed - read).map_or(CHUNK, |left| left.min(CHUNK));
            let found = self.fill(&mut chunk[..length])?;
            read += found as u64;
            if found < length {
                self.complete(needed, read)?;
            }
            self.hash.update(&chunk[..found]);
            elements.extend(chunk[..found].as_chunks().0.iter().map(|&bytes| from_bytes(bytes)));
        }
        Ok(elements)
    }

    fn words(&mut self, factors: [usize; 3]) -> Checked<Vec<u32>> {
        self.array(product(factors)?, u32::from_le_bytes)
    }

    fn halves(&mut self, factors: [usize; 3]) -> Checked<Vec<f16>> {
        self.array(product(factors)?, f16::from_le_bytes)
    }

    fn layer(&mut self, header: &SnapshotHeader, index: usize) -> Checked<CanonicalLayer> {
        let spec = &header.layers[index];
        let (tokens, sinks) = (header.tokens.len(), header.config.sink_length());
        let quantized = header.packed.map(|end| end - sinks);
        let name = |input: &mut Self, what: &str| {
            input.part = format!("layer {index}: {what}");
        };
        name(self, "keys of the sinks");
        let keys = self.full(spec, spec.format.keys, 0, tokens.min(sinks))?;
        name(self, "values of the sinks");
        let values = self.full(spec, spec.format.values, 0, tokens.min(sinks))?;
        let sink_tokens = KeyValue::new(keys, values);

        name(self, "quantized keys");
        let packed_keys = match spec.format.keys.bits {
            None => None,
            Some(bits) => Some(self.keys(header, spec, bits, quantized.keys)?),
        };
        name(self, "quantized values");
        let packed_values = match spec.format.values.bits {
            None => None,
            Some(bits) => Some(self.values(header, spec, bits, quantized.values)?),
        };

        let first =
            spec.packs().zip(header.kept).map(|(packs, kept)| if packs { kept } else { sinks });
        let count = first.map(|first| tokens.max(first) - first);
        name(self, "full-precision keys");
        let keys = self.full(spec, spec.format.keys, first.keys, count.keys)?;
        name(self, "full-precision values");
        let values = self.full(spec, spec.format.values, first.values, count.values)?;
        let full = KeyValue::new(keys, values);
        Ok(CanonicalLayer { sinks: sink_tokens, packed_keys, packed_values, full })
    }

    fn keys(
        &mut self,
        header: &SnapshotHeader,
        spec: &LayerSpec,
        bits: Bits,
        tokens: usize,
    ) -> Checked<PackedKeys> {
        let (kv_heads, head_dim) = (spec.kv_heads, spec.head_dim);
        let group_size = header.config.group_size();
        let groups = tokens / group_size;
        let codes = self.words([kv_heads, words_for(bits, tokens), head_dim])?;
        let scales = self.halves([kv_heads, groups, head_dim])?;
        let zeros = self.halves([kv_heads, groups, head_dim])?;
        let promoted = match spec.promoted_channels() {
            None => None,
            Some(count) => {
                let mask = self.words([kv_heads, groups, Promotion::mask_words(head_dim)])?;
                let lo = self.words([kv_heads, words_for(Bits::Two, tokens), count])?;
                Some(PromotedKeys { count, mask, lo })
            }
        };
        Ok(PackedKeys {
            bits,
            group_size,
            kv_heads,
            tokens,
            head_dim,
            codes,
            scales,
            zeros,
            promoted,
        })
    }

    fn values(
        &mut self,
        header: &SnapshotHeader,
        spec: &LayerSpec,
        bits: Bits,
        tokens: usize,
    ) -> Checked<PackedValues> {
        let (kv_heads, head_dim) = (spec.kv_heads, spec.head_dim);
        let group_size = header.config.group_size();
        let groups = head_dim.div_ceil(group_size);
        let codes = self.words([kv_heads, tokens, words_for(bits, head_dim)])?;
        let scales = self.halves([kv_heads, tokens, groups])?;
        let zeros = self.halves([kv_heads, tokens, groups])?;
        Ok(PackedValues { bits, group_size, kv_heads, tokens, head_dim, codes, scales, zeros })
    }

    fn full(
        &mut self,
        spec: &LayerSpec,
        format: Format,
        first: usize,
        tokens: usize,
    ) -> Checked<FullTokens> {
        let count = product([spec.kv_heads, tokens, spec.head_dim])?;
        // A conversion would make them quiet, and the bytes others.
        let mut signaling = false;
        let data = match format.store {
            StoreDtype::F16 => self.array(count, |bytes| {
                let bits = u16::from_le_bytes(bytes);
                signaling |= bits & 0x7fff > 0x7c00 && bits & 0x0200 == 0;
                f16::from_bits(bits).to_f32()
            }),
            StoreDtype::Bf16 => self.array(count, |bytes| {
                let bits = u16::from_le_bytes(bytes);
                signaling |= bits & 0x7fff > 0x7f80 && bits & 0x0040 == 0;
                bf16::from_bits(bits).to_f32()
            }),
            StoreDtype::F32 => self.array(count, f32::from_le_bytes),
        }?;
        if signaling {
            return Err(SnapshotError::invalid(format!("{} hold a signaling NaN", self.part)));
        }
        Ok(FullTokens { first, tokens, data })
    }
}

fn product(factors: [usize; 3]) -> Checked<usize> {
    let product = factors.iter().try_fold(1usize, |product, &factor| product.checked_mul(factor));
    product.ok_or_else(|| SnapshotError::invalid(format!("an array of shape {factors:?}")))
}
