//! Quantized weights times 8-bit activations.
//!
//! With `w = s·c + m` per sub-block of the weights and `x = t·q` per block of the activations,
//!
//! ```text
//! Σ w·x = Σ_sub-blocks  s·t·(Σ c·q) + m·(t·Σ q)
//! ```
//!
//! where `Σ c·q` is an exact integer and `t·Σ q` was prepared with the activations. Eight weight rows
//! form a *panel*: their codes are unpacked and interleaved, a stretch of columns at a time, so that a
//! vector holds the eight rows side by side and a step multiplies them by four consecutive
//! activations, broadcast. No sum ever crosses lanes, each result has one accumulator, which takes
//! the sub-blocks in order, and the panel is reused for all activation rows of the tile. A single row
//! takes the same path; unpacking is then most of its work.

use super::Input;
use super::activations::{Activations, Row};
use super::tiles::{PANEL, TILE_ROWS, Tile, for_each_tile};
use crate::isa::{Bytes32, Kernel, LANES, Lanes, Simd};
use kivi_core::WeightData;
use kivi_core::blocks::{Block, STRETCH};
use std::marker::PhantomData;

/// Columns unpacked at once: 8 KiB of codes, a quarter of a first-level cache.
const PANEL_COLUMNS: usize = 1024;

const _: () = assert!(PANEL == LANES);

/// Multiplies weights in blocks `B`, whose sub-blocks have `4·STEPS` elements.
pub(super) fn multiply<B: Block, const STEPS: usize>(input: Input<'_>, out: &mut [f32]) {
    const { assert!(4 * STEPS == B::SUB_BLOCK && STRETCH.is_multiple_of(B::SUB_BLOCK)) };
    const { assert!(PANEL_COLUMNS.is_multiple_of(B::FORMAT.block_elements())) };
    let Input { isa, weight, x, bias, .. } = input;
    let [outputs, columns] = weight.shape();
    let x = &Activations::quantize(isa, x, columns.max(1), B::SUB_BLOCK);
    for_each_tile(out, outputs, columns, |tile| {
        isa.run(MultiplyTile::<B, STEPS> { weight, x, bias, tile, block: PhantomData });
    });
}

/// One tile of [`multiply`].
struct MultiplyTile<'a, B, const STEPS: usize> {
    weight: &'a WeightData,
    x: &'a Activations,
    bias: Option<&'a [f32]>,
    tile: Tile<'a>,
    block: PhantomData<B>,
}

impl<B: Block, const STEPS: usize> Kernel for MultiplyTile<'_, B, STEPS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Tile { rows, outputs, mut out } = self.tile;
        let [_, columns] = self.weight.shape();
        let mut panel = Panel::new::<B>(columns.min(PANEL_COLUMNS));
        let mut sums = [Lanes::default(); TILE_ROWS];
        let sums = &mut sums[..rows.len()];
        for first in outputs.clone().step_by(PANEL) {
            sums.fill(Lanes::default());
            // The last panel repeats the last row; its surplus results are dropped.
            let weights: [&[B]; PANEL] = std::array::from_fn(|lane| {
                bytemuck::cast_slice(self.weight.row((first + lane).min(outputs.end - 1)))
            });
            for start in (0..columns).step_by(PANEL_COLUMNS) {
                let end = columns.min(start + PANEL_COLUMNS);
                let elements = B::FORMAT.block_elements();
                panel.unpack(simd, weights.map(|row| &row[start / elements..end / elements]));
                for (sums, row) in sums.chunks_mut(4).zip(rows.clone().step_by(4)) {
                    let x = |i| {
                        let Row { codes, scales } = self.x.row(row + i);
                        let scales = &scales[start / B::SUB_BLOCK..end / B::SUB_BLOCK];
                        Row { codes: &codes[start..end], scales }
                    };
                    match sums {
                        [a, b, c, d] => {
                            let sums = [a, b, c, d];
                            accumulate::<S, B, STEPS, 4>(
                                simd,
                                &panel,
                                [x(0), x(1), x(2), x(3)],
                                sums,
                            );
                        }
                        [a, b, c] => {
                            let sums = [a, b, c];
                            accumulate::<S, B, STEPS, 3>(simd, &panel, [x(0), x(1), x(2)], sums);
                        }
                        [a, b] => {
                            accumulate::<S, B, STEPS, 2>(simd, &panel, [x(0), x(1)], [a, b]);
                        }
                        [a] => accumulate::<S, B, STEPS, 1>(simd, &panel, [x(0)], [a]),
                        _ => {}
                    }
                }
            }
            let bias = self.bias.map(|bias| &bias[first..]);
            for (out, Lanes(sums)) in out.iter_mut().zip(&*sums) {
                let out = &mut out[first - outputs.start..];
                for (lane, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                    *out = bias.map_or(*sum, |bias| sum + bias[lane]);
                }
            }
        }
    }
}

/// Repeats a statement for a constant 0 … 7.
macro_rules! unroll_8 {
    ($index:ident => $body:expr) => {
        unroll_8!($index => $body; 0 1 2 3 4 5 6 7)
    };
    ($index:ident => $body:expr; $($value:literal)*) => {
        $({
            let $index = $value;
            $body
        })*
    };
}

/// Eight weight rows, unpacked and interleaved. The columns in use are those unpacked last.
struct Panel {
    /// `[columns / 32]` of eight steps: bytes `4·lane …` of one are row `lane`'s codes of four
    /// columns.
    codes: Vec<[Bytes32; STRETCH / 4]>,
    /// `[columns / sub_block]`: scale and min of each row.
    scales: Vec<[Lanes; 2]>,
}

impl Panel {
    /// Room for `columns` columns.
    fn new<B: Block>(columns: usize) -> Self {
        Self {
            codes: vec![Default::default(); columns / STRETCH],
            scales: vec![Default::default(); columns / B::SUB_BLOCK],
        }
    }

    /// Unpacks the same columns of eight rows, all of the same length.
    #[inline(always)]
    fn unpack<S: Simd, B: Block>(&mut self, simd: S, rows: [&[B]; PANEL]) {
        let elements = B::FORMAT.block_elements();
        let blocks = rows[0].len();
        let rows = rows.map(|row| &row[..blocks]);
        let codes = self.codes.chunks_exact_mut(elements / STRETCH);
        let scales = self.scales.chunks_exact_mut(elements / B::SUB_BLOCK);
        for ((index, codes), scales) in (0..blocks).zip(codes).zip(scales) {
            let [a, b, c, d, e, f, g, h] = rows;
            let block = [
                &a[index], &b[index], &c[index], &d[index], &e[index], &f[index], &g[index],
                &h[index],
            ];
            unpack_scales(simd, block, scales);
            // Unrolled, so that shifts and masks are constants.
            unroll_8!(stretch => if let Some(out) = codes.get_mut(stretch) {
                unpack_codes(simd, block, stretch, out);
            });
        }
    }
}

/// Scales and mins of eight blocks, such that a value is `scale·code + min`.
#[inline(always)]
fn unpack_scales<S: Simd, B: Block>(simd: S, blocks: [&B; PANEL], out: &mut [[Lanes; 2]]) {
    let mut halves = [[[0; 2]; LANES]; 2];
    for (lane, block) in blocks.iter().enumerate() {
        let [scale, min] = block.header();
        halves[0][lane] = scale.to_le_bytes();
        halves[1][lane] = min.to_le_bytes();
    }
    let [mut scales, mut mins] = [[0.0; LANES]; 2];
    simd.store(simd.load_f16_le(&halves[0]), &mut scales);
    simd.store(simd.load_f16_le(&halves[1]), &mut mins);
    let per_half = out.len().div_ceil(2);
    for (half, out) in out.chunks_mut(per_half).enumerate() {
        unroll_8!(sub => if let Some([Lanes(out_scales), Lanes(out_mins)]) = out.get_mut(sub) {
            for lane in 0..LANES {
                let sub = half * per_half + sub;
                let (scale, min) = blocks[lane].affine(scales[lane], mins[lane], sub);
                out_scales[lane] = scale;
                out_mins[lane] = min - scale * f32::from(B::OFFSET);
            }
        });
    }
}

/// Codes of one stretch of eight blocks; signed, their offset gone, if they have 8 bits.
#[inline(always)]
fn unpack_codes<S: Simd, B: Block>(
    simd: S,
    blocks: [&B; PANEL],
    stretch: usize,
    out: &mut [Bytes32; STRETCH / 4],
) {
    if let Some(nibbles) = B::NIBBLES {
        let [a, b, c, d, e, f, g, h] = blocks;
        let rows = [
            nibbles(a),
            nibbles(b),
            nibbles(c),
            nibbles(d),
            nibbles(e),
            nibbles(f),
            nibbles(g),
            nibbles(h),
        ];
        return simd.interleave_nibbles(rows, out);
    }
    let mut rows = [Bytes32::default(); PANEL];
    for (Bytes32(codes), block) in rows.iter_mut().zip(blocks) {
        *codes = block.codes(stretch);
        if B::CODE_BITS == 8 {
            for code in codes {
                *code ^= 0x80;
            }
        }
    }
    simd.interleave(&rows, out);
}

/// Adds the panel's products with `R` rows of activations to their sums.
#[inline(always)]
fn accumulate<S: Simd, B: Block, const STEPS: usize, const R: usize>(
    simd: S,
    panel: &Panel,
    x: [Row<'_>; R],
    sums: [&mut Lanes; R],
) {
    let subs = x[0].scales.len();
    let codes = &panel.codes.as_flattened().as_chunks::<STEPS>().0[..subs];
    let scales = &panel.scales[..subs];
    let x_codes = x.map(|x| &x.codes.as_chunks::<4>().0.as_chunks::<STEPS>().0[..subs]);
    let x_scales = x.map(|x| &x.scales[..subs]);
    let mut totals = [simd.splat(0.0); R];
    for (total, sums) in totals.iter_mut().zip(&sums) {
        *total = simd.load(&sums.0);
    }
    for sub in 0..subs {
        let [scale, min] = [simd.load(&scales[sub][0].0), simd.load(&scales[sub][1].0)];
        for r in 0..R {
            let dot = simd.dot_codes(B::CODE_BITS, &codes[sub], &x_codes[r][sub]);
            let [x_scale, x_sum] = x_scales[r][sub];
            let [x_scale, x_sum] = [simd.splat(x_scale), simd.splat(x_sum)];
            let scaled = simd.mul(simd.i32_to_f32(dot), scale);
            totals[r] = simd.mul_add(scaled, x_scale, totals[r]);
            if B::CODE_BITS != 8 {
                totals[r] = simd.mul_add(min, x_sum, totals[r]);
            }
        }
    }
    for (total, sums) in totals.into_iter().zip(sums) {
        simd.store(total, &mut sums.0);
    }
}
