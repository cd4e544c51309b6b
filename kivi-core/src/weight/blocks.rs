//! The quantized blocks of GGUF files: one structure per format, its fields in file order.
//!
//! Every format is affine over sub-blocks of 16 or 32 elements: `value = scale·(code − offset) + min`
//! with an unsigned code. [`Block`] splits a block into exactly these parts, so that one piece of
//! generic code dequantizes, or multiplies, all ten formats. The layouts are those of ggml's
//! `ggml-common.h`; `tests/golden_weights.rs` holds them against the Python package `gguf`.
//!
//! Half-precision fields are little-endian. The byte offset of each field stands beside it.

use super::WeightFormat;
use bytemuck::{Pod, Zeroable};

/// Elements whose codes [`Block::codes`] unpacks at once.
pub const STRETCH: usize = 32;

/// A block of a quantized format. Any bytes are a valid block.
pub trait Block: Pod {
    /// The format this is a block of.
    const FORMAT: WeightFormat;
    /// Elements that share a scale and a min: 16 or 32.
    const SUB_BLOCK: usize;
    /// Codes are `0 … 2^CODE_BITS − 1`.
    const CODE_BITS: u32;
    /// Subtracted from a code before it is multiplied by the scale; a power of two or 0.
    const OFFSET: u8;

    /// Codes of the elements `32·stretch … 32·stretch + 31`, in order. `stretch` counts within the
    /// block; the formats with 32 elements ignore it.
    fn codes(&self, stretch: usize) -> [u8; STRETCH];

    /// Bits of the f16 scale and f16 min of the whole block (0 for formats without a min).
    fn header(&self) -> [u16; 2];

    /// Scale and min of sub-block `sub`, from the [`header`](Self::header) converted to f32.
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32);
}

type Half = [u8; 2];

/// Defines a block structure whose fields are byte arrays, hence without padding or alignment.
macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $format:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == WeightFormat::$format.block_bytes());
        const _: () = assert!(align_of::<$name>() == 1);
    };
}

block! {
    /// 32 elements of 4 bits, symmetric: `d·(c − 8)`.
    BlockQ4_0, Q4_0 {
        /// 0: f16 scale.
        d: Half,
        /// 2: elements 0–15 in the low nibbles, 16–31 in the high ones.
        qs: [u8; 16],
    }
}

block! {
    /// 32 elements of 4 bits: `d·c + m`.
    BlockQ4_1, Q4_1 {
        /// 0: f16 scale.
        d: Half,
        /// 2: f16 min.
        m: Half,
        /// 4: elements 0–15 in the low nibbles, 16–31 in the high ones.
        qs: [u8; 16],
    }
}

block! {
    /// 32 elements of 5 bits, symmetric: `d·(c − 16)`.
    BlockQ5_0, Q5_0 {
        /// 0: f16 scale.
        d: Half,
        /// 2: bit 4 of element `i` is bit `i` of this little-endian word.
        qh: [u8; 4],
        /// 6: low four bits, as in [`BlockQ4_0`].
        qs: [u8; 16],
    }
}

block! {
    /// 32 elements of 5 bits: `d·c + m`.
    BlockQ5_1, Q5_1 {
        /// 0: f16 scale.
        d: Half,
        /// 2: f16 min.
        m: Half,
        /// 4: bit 4 of element `i` is bit `i` of this little-endian word.
        qh: [u8; 4],
        /// 8: low four bits, as in [`BlockQ4_0`].
        qs: [u8; 16],
    }
}

block! {
    /// 32 elements of 8 bits, symmetric: `d·q` with a signed `q`, here the code `q + 128`.
    BlockQ8_0, Q8_0 {
        /// 0: f16 scale.
        d: Half,
        /// 2: signed bytes.
        qs: [u8; 32],
    }
}

block! {
    /// 256 elements of 2 bits in 16 sub-blocks: `d·scale·c − dmin·min`, scale and min of 4 bits.
    BlockQ2K, Q2K {
        /// 0: sub-block scale in the low nibble, min in the high one.
        scales: [u8; 16],
        /// 16: byte `32·h + l` holds the elements `128·h + 32·j + l` at bits `2j`.
        qs: [u8; 64],
        /// 80: f16 scale of the scales.
        d: Half,
        /// 82: f16 scale of the mins.
        dmin: Half,
    }
}

block! {
    /// 256 elements of 3 bits in 16 sub-blocks: `d·(scale − 32)·(c − 4)`, scale of 6 bits.
    BlockQ3K, Q3K {
        /// 0: bit 2 of element `32·j + l` is bit `j` of byte `l`.
        hmask: [u8; 32],
        /// 32: low two bits, as in [`BlockQ2K`].
        qs: [u8; 64],
        /// 96: low four bits of scale `s` in the nibbles of bytes 0–7 (`s ≥ 8` high), its upper two
        /// at bits `2·(s/4)` of byte `8 + s%4`.
        scales: [u8; 12],
        /// 108: f16 scale of the scales.
        d: Half,
    }
}

block! {
    /// 256 elements of 4 bits in 8 sub-blocks: `d·scale·c − dmin·min`, scale and min of 6 bits.
    BlockQ4K, Q4K {
        /// 0: f16 scale of the scales.
        d: Half,
        /// 2: f16 scale of the mins.
        dmin: Half,
        /// 4: scales and mins, see [`scale_min_6bit`].
        scales: [u8; 12],
        /// 16: byte `32·p + l` holds elements `64·p + l` (low nibble) and `64·p + 32 + l` (high).
        qs: [u8; 128],
    }
}

block! {
    /// 256 elements of 5 bits in 8 sub-blocks: `d·scale·c − dmin·min`, scale and min of 6 bits.
    BlockQ5K, Q5K {
        /// 0: f16 scale of the scales.
        d: Half,
        /// 2: f16 scale of the mins.
        dmin: Half,
        /// 4: scales and mins, see [`scale_min_6bit`].
        scales: [u8; 12],
        /// 16: bit 4 of element `32·j + l` is bit `j` of byte `l`.
        qh: [u8; 32],
        /// 48: low four bits, as in [`BlockQ4K`].
        qs: [u8; 128],
    }
}

block! {
    /// 256 elements of 6 bits in 16 sub-blocks: `d·scale·(c − 32)` with a signed 8-bit scale.
    BlockQ6K, Q6K {
        /// 0: low four bits: byte `64·h + 32·r + l` holds elements `128·h + 32·r + l` (low nibble)
        /// and `128·h + 32·(r + 2) + l` (high), `r` in 0, 1.
        ql: [u8; 128],
        /// 128: upper two bits of element `128·h + 32·j + l` at bits `2j` of byte `32·h + l`.
        qh: [u8; 64],
        /// 192: signed scales.
        scales: [u8; 16],
        /// 208: f16 scale of the scales.
        d: Half,
    }
}

/// 32 codes from 16 bytes: low nibbles first, then the high ones.
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [u8; STRETCH] {
    let mut codes = [0; STRETCH];
    for i in 0..16 {
        codes[i] = qs[i] & 15;
        codes[i + 16] = qs[i] >> 4;
    }
    codes
}

/// [`nibbles`] with a fifth bit from the little-endian word `qh`.
#[inline(always)]
fn nibbles_5bit(qs: &[u8; 16], qh: [u8; 4]) -> [u8; STRETCH] {
    let mut codes = nibbles(qs);
    let [a, b, c, d] = qh.map(|byte| [byte; 8]);
    let spread = [a, b, c, d];
    for (i, (code, byte)) in codes.iter_mut().zip(spread.as_flattened()).enumerate() {
        *code |= if byte & (1 << (i % 8)) != 0 { 16 } else { 0 };
    }
    codes
}

/// The bits `shift …` of each of the 32 bytes `32·part …`, masked.
#[inline(always)]
fn fields(bytes: &[u8], part: usize, shift: usize, mask: u8) -> [u8; STRETCH] {
    let mut codes = [0; STRETCH];
    for (code, byte) in codes.iter_mut().zip(&bytes[STRETCH * part..]) {
        *code = byte >> shift & mask;
    }
    codes
}

/// `low | high << shift`, element by element.
#[inline(always)]
fn join(mut low: [u8; STRETCH], high: [u8; STRETCH], shift: u32) -> [u8; STRETCH] {
    for (low, high) in low.iter_mut().zip(high) {
        *low |= high << shift;
    }
    low
}

/// Scale and min `s` (0–7) of 6 bits each from the 12 bytes of Q4_K and Q5_K: the first four pairs
/// are the low six bits of bytes `s` and `s + 4`; the others have their low four bits in the nibbles
/// of byte `s + 4` and their upper two above those pairs.
#[inline(always)]
fn scale_min_6bit(bytes: &[u8; 12], s: usize) -> (f32, f32) {
    let (scale, min) = if s < 4 {
        (bytes[s] & 63, bytes[s + 4] & 63)
    } else {
        let low = bytes[s + 4];
        (low & 15 | (bytes[s - 4] >> 6) << 4, low >> 4 | (bytes[s] >> 6) << 4)
    };
    (scale.into(), min.into())
}

impl Block for BlockQ4_0 {
    const FORMAT: WeightFormat = WeightFormat::Q4_0;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 4;
    const OFFSET: u8 = 8;

    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; STRETCH] {
        nibbles(&self.qs)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, _: usize) -> (f32, f32) {
        (scale, min)
    }
}

impl Block for BlockQ4_1 {
    const FORMAT: WeightFormat = WeightFormat::Q4_1;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 4;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; STRETCH] {
        nibbles(&self.qs)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), u16::from_le_bytes(self.m)]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, _: usize) -> (f32, f32) {
        (scale, min)
    }
}

impl Block for BlockQ5_0 {
    const FORMAT: WeightFormat = WeightFormat::Q5_0;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 5;
    const OFFSET: u8 = 16;

    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; STRETCH] {
        nibbles_5bit(&self.qs, self.qh)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, _: usize) -> (f32, f32) {
        (scale, min)
    }
}

impl Block for BlockQ5_1 {
    const FORMAT: WeightFormat = WeightFormat::Q5_1;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 5;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; STRETCH] {
        nibbles_5bit(&self.qs, self.qh)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), u16::from_le_bytes(self.m)]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, _: usize) -> (f32, f32) {
        (scale, min)
    }
}

impl Block for BlockQ8_0 {
    const FORMAT: WeightFormat = WeightFormat::Q8_0;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 8;
    const OFFSET: u8 = 128;

    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; STRETCH] {
        let mut codes = self.qs;
        for code in &mut codes {
            *code ^= 0x80;
        }
        codes
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, _: usize) -> (f32, f32) {
        (scale, min)
    }
}

impl Block for BlockQ2K {
    const FORMAT: WeightFormat = WeightFormat::Q2K;
    const SUB_BLOCK: usize = 16;
    const CODE_BITS: u32 = 2;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn codes(&self, stretch: usize) -> [u8; STRETCH] {
        fields(&self.qs, stretch / 4, 2 * (stretch % 4), 3)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), u16::from_le_bytes(self.dmin)]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32) {
        let packed = self.scales[sub];
        (scale * f32::from(packed & 15), -(min * f32::from(packed >> 4)))
    }
}

impl Block for BlockQ3K {
    const FORMAT: WeightFormat = WeightFormat::Q3K;
    const SUB_BLOCK: usize = 16;
    const CODE_BITS: u32 = 3;
    const OFFSET: u8 = 4;

    #[inline(always)]
    fn codes(&self, stretch: usize) -> [u8; STRETCH] {
        let low = fields(&self.qs, stretch / 4, 2 * (stretch % 4), 3);
        join(low, fields(&self.hmask, 0, stretch, 1), 2)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32) {
        let low = self.scales[sub % 8] >> (4 * (sub / 8)) & 15;
        let high = self.scales[8 + sub % 4] >> (2 * (sub / 4)) & 3;
        (scale * (f32::from(low | high << 4) - 32.0), min)
    }
}

impl Block for BlockQ4K {
    const FORMAT: WeightFormat = WeightFormat::Q4K;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 4;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn codes(&self, stretch: usize) -> [u8; STRETCH] {
        fields(&self.qs, stretch / 2, 4 * (stretch % 2), 15)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), u16::from_le_bytes(self.dmin)]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32) {
        let (sub_scale, sub_min) = scale_min_6bit(&self.scales, sub);
        (scale * sub_scale, -(min * sub_min))
    }
}

impl Block for BlockQ5K {
    const FORMAT: WeightFormat = WeightFormat::Q5K;
    const SUB_BLOCK: usize = 32;
    const CODE_BITS: u32 = 5;
    const OFFSET: u8 = 0;

    #[inline(always)]
    fn codes(&self, stretch: usize) -> [u8; STRETCH] {
        let low = fields(&self.qs, stretch / 2, 4 * (stretch % 2), 15);
        join(low, fields(&self.qh, 0, stretch, 1), 4)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), u16::from_le_bytes(self.dmin)]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32) {
        let (sub_scale, sub_min) = scale_min_6bit(&self.scales, sub);
        (scale * sub_scale, -(min * sub_min))
    }
}

impl Block for BlockQ6K {
    const FORMAT: WeightFormat = WeightFormat::Q6K;
    const SUB_BLOCK: usize = 16;
    const CODE_BITS: u32 = 6;
    const OFFSET: u8 = 32;

    #[inline(always)]
    fn codes(&self, stretch: usize) -> [u8; STRETCH] {
        let (half, quarter) = (stretch / 4, stretch % 4);
        let low = fields(&self.ql, 2 * half + quarter % 2, 4 * (quarter / 2), 15);
        join(low, fields(&self.qh, half, 2 * quarter, 3), 4)
    }

    #[inline(always)]
    fn header(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }

    #[inline(always)]
    fn affine(&self, scale: f32, min: f32, sub: usize) -> (f32, f32) {
        (scale * f32::from(self.scales[sub].cast_signed()), min)
    }
}
