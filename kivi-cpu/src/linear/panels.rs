//! The form in which quantized weights are kept: rows interleaved in panels of sixteen.
//!
//! A vector lane holds one weight row, so that no sum ever crosses lanes and sixteen scales are one
//! load. For each *stretch* of 32 columns a panel holds eight *steps* of four columns: byte `4·o + j`
//! of step `s` is the code of row `o`, column `4·s + j`. Steps are packed without a gap into
//! `CODE_BITS` vectors of 64 bytes, low bits first, the upper bits of odd-sized codes in planes of
//! their own ([`Layout::step`]); a shift and a mask take a step out.
//!
//! Scales and mins stay what they are in the file, f16 and small integers, sixteen rows beside each
//! other. Nothing is rounded: [`dequantize`] gives the numbers of
//! [`WeightData::dequantize_row`](kivi_core::WeightData::dequantize_row), bit for bit. The size is
//! that of the file, except that the sub-block scales and mins of K-quants take a byte each: 2.8 %
//! more for Q4_K, 2.3 % for Q5_K, 3.6 % for Q3_K, 19 % for Q2_K.

use crate::isa::{Bytes64, Isa, Kernel, LANES, Simd};
use half::f16;
use kivi_core::WeightData;
use kivi_core::blocks::{Block, STRETCH};
use rayon::prelude::*;
use std::marker::PhantomData;

use super::work::PANEL;

/// Steps of a stretch.
pub(super) const STEPS: usize = STRETCH / 4;

const _: () = assert!(PANEL == LANES);

/// Columns packed by one task, counted over all rows: about 100 µs of work.
const TASK_ELEMENTS: usize = 1 << 18;

/// A quantized weight in panels. The last one is filled up with rows of zeros.
pub(super) struct Panels {
    /// `[panels, columns / 32, CODE_BITS]`
    codes: Vec<Bytes64>,
    /// `[panels, columns / block, PARTS]`: the f16 scale, and the min if there is one; that of
    /// K-quants, which is subtracted, with the opposite sign.
    headers: Vec<[[u8; 2]; PANEL]>,
    /// `[panels, columns / SUB_BLOCK, PARTS]`: what the header is multiplied by; none in formats
    /// with a scale per sub-block.
    subs: Vec<[i8; PANEL]>,
}

/// One panel of [`Panels`].
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) codes: &'a [Bytes64],
    pub(super) headers: &'a [[[u8; 2]; PANEL]],
    pub(super) subs: &'a [[i8; PANEL]],
}

/// How the panels of a block format are laid out.
pub(super) trait Layout: Block {
    /// Vectors of codes per stretch.
    const VECTORS: usize = Self::CODE_BITS as usize;
    /// Bits of a code in the first [`LOW_BITS`](Self::LOW_BITS) vectors of a stretch; a divisor of 8.
    const LOW_BITS: u32 = match Self::CODE_BITS {
        bits @ (1 | 2 | 4 | 8) => bits,
        3 => 2,
        _ => 4,
    };
    /// Bits in the vectors after those; a divisor of 8.
    const HIGH_BITS: u32 = Self::CODE_BITS - Self::LOW_BITS;
    /// A scale, or a scale and a min.
    const PARTS: usize = if Self::OFFSET == 0 { 2 } else { 1 };
    /// Stretches of a block.
    const STRETCHES: usize = Self::FORMAT.block_elements() / STRETCH;
    /// Sub-blocks of a stretch.
    const STRETCH_SUBS: usize = STRETCH / Self::SUB_BLOCK;
    /// Sub-block scales of a block, or none if the block is the sub-block.
    const SUBS: usize = if Self::STRETCHES > 1 { Self::STRETCHES * Self::STRETCH_SUBS } else { 0 };

    /// Takes step `step` out of the vectors of a stretch.
    #[inline(always)]
    fn step<S: Simd>(simd: S, vectors: &[Bytes64], step: usize) -> S::I32 {
        let field = |vectors: &[Bytes64], bits: u32| {
            let (vector, shift) = place(bits, step);
            simd.shr(simd.load_bytes(&vectors[vector]), shift)
        };
        let mask = |bits: u32| simd.splat_u32(((1 << bits) - 1) * 0x0101_0101);
        let (low, high) = vectors.split_at(Self::LOW_BITS as usize);
        let low = field(low, Self::LOW_BITS);
        if Self::LOW_BITS == 8 {
            return low;
        }
        let low = simd.and(low, mask(Self::LOW_BITS));
        if Self::HIGH_BITS == 0 {
            return low;
        }
        let high = simd.and(field(high, Self::HIGH_BITS), mask(Self::HIGH_BITS));
        simd.add_u32(low, simd.shl(high, Self::LOW_BITS))
    }
}

impl<B: Block> Layout for B {}

/// The vector and the shift at which `bits` bits of step `step` lie.
#[inline(always)]
const fn place(bits: u32, step: usize) -> (usize, u32) {
    (step % bits as usize, bits * (step / bits as usize) as u32)
}

impl Panels {
    /// Packs a weight in blocks `B`, in parallel in the current rayon pool.
    pub(super) fn pack<B: Block>(isa: Isa, weight: &WeightData) -> Self {
        let [outputs, columns] = weight.shape();
        let panels = outputs.div_ceil(PANEL);
        let blocks = columns / B::FORMAT.block_elements();
        let [codes, headers, subs] = Self::panel_lengths::<B>(columns);
        let mut packed = Self {
            codes: vec![Bytes64::ZERO; panels * codes],
            headers: vec![Default::default(); panels * headers],
            subs: vec![[0; PANEL]; panels * subs],
        };
        if blocks == 0 {
            return packed;
        }
        let pack = |panel: usize, codes: &mut [Bytes64], headers: &mut [_], subs: &mut [_]| {
            let rows = PANEL * panel..outputs.min(PANEL * (panel + 1));
            isa.run(Pack::<B> { weight, rows, codes, headers, subs, block: PhantomData });
        };
        let per_task = (TASK_ELEMENTS / (PANEL * columns)).max(1);
        let codes = packed.codes.par_chunks_exact_mut(codes);
        let headers = packed.headers.par_chunks_exact_mut(headers);
        let panels = codes.zip(headers).enumerate().with_min_len(per_task);
        if subs == 0 {
            panels.for_each(|(panel, (codes, headers))| pack(panel, codes, headers, &mut []));
        } else {
            panels
                .zip(packed.subs.par_chunks_exact_mut(subs))
                .for_each(|((panel, (codes, headers)), subs)| pack(panel, codes, headers, subs));
        }
        packed
    }

    /// Elements of the three parts of a panel.
    fn panel_lengths<B: Block>(columns: usize) -> [usize; 3] {
        let blocks = columns / B::FORMAT.block_elements();
        [columns / STRETCH * B::VECTORS, blocks * B::PARTS, blocks * B::SUBS * B::PARTS]
    }

    /// Rows `16·panel …` of a weight of `columns` columns.
    #[inline(always)]
    pub(super) fn panel<B: Block>(&self, panel: usize, columns: usize) -> Panel<'_> {
        let [codes, headers, subs] = Self::panel_lengths::<B>(columns);
        Panel {
            codes: &self.codes[panel * codes..][..codes],
            headers: &self.headers[panel * headers..][..headers],
            subs: &self.subs[panel * subs..][..subs],
        }
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.codes[..]) + size_of_val(&self.headers[..]) + size_of_val(&self.subs[..])
    }
}

/// Packs one panel.
struct Pack<'a, B> {
    weight: &'a WeightData,
    /// At most [`PANEL`] rows of the weight.
    rows: std::ops::Range<usize>,
    codes: &'a mut [Bytes64],
    headers: &'a mut [[[u8; 2]; PANEL]],
    subs: &'a mut [[i8; PANEL]],
    block: PhantomData<B>,
}

impl<B: Block> Kernel for Pack<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let mut rows: [&[B]; PANEL] = [&[]; PANEL];
        for (row, blocks) in self.rows.zip(&mut rows) {
            *blocks = bytemuck::cast_slice(self.weight.row(row));
        }
        let codes = self.codes.chunks_exact_mut(B::STRETCHES * B::VECTORS);
        let headers = self.headers.chunks_exact_mut(B::PARTS);
        for (index, (codes, headers)) in codes.zip(headers).enumerate() {
            for (lane, blocks) in rows.iter().enumerate() {
                let Some(block) = blocks.get(index) else { continue };
                let [scale, min] = block.header();
                let min = if B::SUBS > 0 { min ^ 0x8000 } else { min };
                for (header, bits) in headers.iter_mut().zip([scale, min]) {
                    header[lane] = bits.to_le_bytes();
                }
                let subs = self.subs.chunks_exact_mut(B::PARTS).skip(index * B::SUBS);
                for (sub, parts) in subs.take(B::SUBS).enumerate() {
                    // Both are integers within −128 … 127.
                    let (scale, min) = block.affine(1.0, -1.0, sub);
                    for (part, integer) in parts.iter_mut().zip([scale, min]) {
                        part[lane] = integer as i8;
                    }
                }
            }
            for (stretch, vectors) in codes.chunks_exact_mut(B::VECTORS).enumerate() {
                let mut steps = [Bytes64::ZERO; STEPS];
                for (lane, blocks) in rows.iter().enumerate() {
                    let Some(block) = blocks.get(index) else { continue };
                    let codes = block.codes(stretch);
                    for (step, codes) in steps.iter_mut().zip(codes.as_chunks::<4>().0) {
                        step.0.as_chunks_mut::<4>().0[lane] = *codes;
                    }
                }
                let (low, high) = vectors.split_at_mut(B::LOW_BITS as usize);
                for (step, codes) in steps.iter().enumerate() {
                    place_step(codes, 0, B::LOW_BITS, step, low);
                    place_step(codes, B::LOW_BITS, B::HIGH_BITS, step, high);
                }
                if B::CODE_BITS == 8 {
                    // Signed, as the multiplication wants them.
                    vectors.iter_mut().flat_map(|Bytes64(codes)| codes).for_each(|c| *c ^= 0x80);
                }
            }
        }
    }
}

/// Adds the bits `from … from + bits − 1` of a step's codes to the vectors that hold them.
#[inline(always)]
fn place_step(codes: &Bytes64, from: u32, bits: u32, step: usize, vectors: &mut [Bytes64]) {
    if bits == 0 {
        return;
    }
    let (vector, shift) = place(bits, step);
    let mask = ((1u32 << bits) - 1) as u8;
    for (out, code) in vectors[vector].0.iter_mut().zip(codes.0) {
        *out |= (code >> from & mask) << shift;
    }
}

/// Writes the values of row `row` to `out`, `[columns]`.
pub(super) fn dequantize<B: Block>(panels: &Panels, row: usize, out: &mut [f32]) {
    let (panel, lane) = (panels.panel::<B>(row / PANEL, out.len()), row % PANEL);
    for (index, out) in out.chunks_exact_mut(B::SUB_BLOCK).enumerate() {
        let block = index / (B::STRETCHES * B::STRETCH_SUBS);
        let [mut scale, mut min] = [1.0, 0.0];
        for (part, value) in [&mut scale, &mut min].into_iter().take(B::PARTS).enumerate() {
            *value = f16::from_le_bytes(panel.headers[block * B::PARTS + part][lane]).to_f32();
            if B::SUBS > 0 {
                *value *= f32::from(panel.subs[index * B::PARTS + part][lane]);
            }
        }
        let vectors = &panel.codes[index / B::STRETCH_SUBS * B::VECTORS..][..B::VECTORS];
        let first = index % B::STRETCH_SUBS * B::SUB_BLOCK;
        for (i, out) in out.iter_mut().enumerate() {
            let value = f32::from(code::<B>(vectors, lane, first + i)) - f32::from(B::OFFSET);
            // Formats without a min skip the addition, which would turn −0 into 0.
            *out = if B::PARTS == 2 { scale * value + min } else { scale * value };
        }
    }
}

/// The code of row `lane` in column `column` of a stretch.
fn code<B: Block>(vectors: &[Bytes64], lane: usize, column: usize) -> u8 {
    let (step, byte) = (column / 4, 4 * lane + column % 4);
    let (low, high) = vectors.split_at(B::LOW_BITS as usize);
    let bits = |vectors: &[Bytes64], bits: u32| {
        let (vector, shift) = place(bits, step);
        vectors[vector].0[byte] >> shift & ((1u32 << bits) - 1) as u8
    };
    match (B::LOW_BITS, B::HIGH_BITS) {
        (8, _) => low[step].0[byte] ^ 0x80,
        (bits_low, 0) => bits(low, bits_low),
        (bits_low, bits_high) => bits(low, bits_low) | bits(high, bits_high) << bits_low,
    }
}
