//! Quantized weights times 8-bit activations.
//!
//! With `w = s·c + m` per sub-block of the weights and `x = t·q` per block of the activations,
//!
//! ```text
//! Σ w·x = Σ_sub-blocks  s·t·(Σ c·q) + m·(t·Σ q)
//! ```
//!
//! where `Σ c·q` is an exact integer and `t·Σ q` was prepared with the activations. A panel of sixteen
//! weight rows ([`panels`](super::panels)) meets up to eight rows of activations at once: its codes are
//! taken out of their bits once and multiplied by four consecutive activations of each row, broadcast.
//! Each result has one accumulator, a lane, which takes the sub-blocks in order; so it does not depend
//! on what is computed beside it.

use super::activations::ActivationBlock;
use super::panels::{Layout, Panel, Panels};
use super::rectangle::Rectangle;
use super::work::PANEL;
use crate::isa::{Isa, Kernel, LANES, Simd};
use kivi_core::blocks::{Block, STRETCH};
use std::marker::PhantomData;

/// Activation rows taken together: as many sums as fit in the registers beside their operands.
const ROWS: usize = 4;
const MORE_ROWS: usize = 8;

/// How far ahead of its use the data of a panel is fetched, in stretches; the next panel follows in
/// memory. (*Measured*: without it, half of the time of a single row goes by waiting.)
const AHEAD: usize = 16;

/// Arguments of one multiplication, lengths checked.
pub(super) struct Input<'a> {
    pub(super) isa: Isa,
    pub(super) weight: &'a Panels,
    pub(super) columns: usize,
    /// The first output to be computed, a multiple of [`PANEL`].
    pub(super) first: usize,
    /// `[rows, columns / 32]`
    pub(super) x: &'a [ActivationBlock],
    /// One for each output to be computed.
    pub(super) bias: Option<&'a [f32]>,
}

/// Multiplies weights in blocks `B` into `out`, `[rows, outputs]`.
pub(super) fn multiply<B: Block>(input: Input<'_>, out: Rectangle<'_>) {
    input.isa.run(Multiply::<B> { input, out, block: PhantomData });
}

struct Multiply<'a, B> {
    input: Input<'a>,
    out: Rectangle<'a>,
    block: PhantomData<B>,
}

impl<B: Block> Kernel for Multiply<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Input { weight, columns, first, .. } = self.input;
        for start in (0..self.out.width()).step_by(PANEL) {
            let panel = weight.panel::<B>((first + start) / PANEL, columns);
            let rows = self.out.rows();
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    1 => self.rows::<S, 1>(simd, panel, start, row),
                    2 | 3 => self.rows::<S, 2>(simd, panel, start, row),
                    MORE_ROWS.. if S::REGISTERS >= 4 * MORE_ROWS => {
                        self.rows::<S, MORE_ROWS>(simd, panel, start, row)
                    }
                    _ => self.rows::<S, ROWS>(simd, panel, start, row),
                };
            }
        }
    }
}

impl<B: Block> Multiply<'_, B> {
    /// The products of a panel with the rows `row … row + R − 1`, to the columns `start …`. Returns
    /// `R`.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(
        &mut self,
        simd: S,
        panel: Panel<'_>,
        start: usize,
        row: usize,
    ) -> usize {
        let blocks = self.input.columns / STRETCH;
        let mut x: [&[ActivationBlock]; R] = [&[]; R];
        for (i, x) in x.iter_mut().enumerate() {
            *x = &self.input.x[(row + i) * blocks..][..blocks];
        }
        let sums = products::<S, B, R>(simd, panel, x);
        for (i, sums) in sums.into_iter().enumerate() {
            let out = &mut self.out.row(row + i)[start..];
            let mut lanes = [0.0; LANES];
            simd.store(sums, &mut lanes);
            if let Some(bias) = self.input.bias {
                for (lane, bias) in lanes.iter_mut().zip(&bias[start..]) {
                    *lane += bias;
                }
            }
            for (out, lane) in out.iter_mut().zip(lanes) {
                *out = lane;
            }
        }
        R
    }
}

/// A loop that is written out: shifts are constants then, which the compiler does not see to where the
/// body is long (*measured*: a tenth of the time in AVX2).
macro_rules! unroll {
    ($step:ident in $($number:literal)* $body:block) => {
        $( { let $step: usize = $number; $body } )*
    };
}

/// The products of a panel of weight rows with `R` rows of activations.
#[inline(always)]
fn products<S: Simd, B: Block, const R: usize>(
    simd: S,
    panel: Panel<'_>,
    x: [&[ActivationBlock]; R],
) -> [S::F32; R] {
    let mut totals = [simd.splat(0.0); R];
    let mut headers = panel.headers.chunks_exact(B::PARTS);
    let mut subs = panel.subs.chunks_exact(B::PARTS);
    let mut parts = [simd.splat(0.0); 2];
    for (stretch, vectors) in panel.codes.chunks_exact(B::VECTORS).enumerate() {
        for vector in 0..B::VECTORS {
            ahead(simd, vectors, AHEAD * B::VECTORS + vector);
        }
        if stretch % B::STRETCHES == 0
            && let Some(header) = headers.next()
        {
            ahead(simd, header, AHEAD.div_ceil(B::STRETCHES) * B::PARTS);
            for (part, header) in parts.iter_mut().zip(header) {
                *part = simd.load_f16_le(header);
            }
        }
        for sub in 0..B::STRETCH_SUBS {
            let [mut scale, mut min] = parts;
            if B::SUBS > 0
                && let Some(sub) = subs.next()
            {
                ahead(simd, sub, AHEAD * B::STRETCH_SUBS * B::PARTS);
                scale = simd.mul(scale, simd.load_i8(&sub[0]));
                if B::PARTS == 2 {
                    min = simd.mul(min, simd.load_i8(&sub[1]));
                }
            }
            if B::PARTS == 1 {
                min = simd.mul(scale, simd.splat(-f32::from(B::OFFSET)));
            }
            let mut sums = [simd.splat_u32(0); R];
            let mut dots = [simd.no_dots(); R];
            unroll!(step in 0 1 2 3 4 5 6 7 {
                if step < B::SUB_BLOCK / 4 {
                    let column = sub * (B::SUB_BLOCK / 4) + step;
                    let w = B::step(simd, vectors, column);
                    for r in 0..R {
                        if step > 0 && step.is_multiple_of(S::depth(B::CODE_BITS)) {
                            sums[r] = simd.add_u32(sums[r], simd.widen(dots[r]));
                            dots[r] = simd.no_dots();
                        }
                        let x = simd.splat_u32(bytemuck::cast(x[r][stretch].codes[column]));
                        dots[r] = simd.dot4(B::CODE_BITS, dots[r], w, x);
                    }
                }
            });
            for (((total, sum), dot), x) in totals.iter_mut().zip(sums).zip(dots).zip(x) {
                let x = &x[stretch];
                let sum = simd.add_u32(sum, simd.widen(dot));
                let scaled = simd.mul(simd.i32_to_f32(sum), scale);
                *total = simd.mul_add(scaled, simd.splat(x.scale), *total);
                // Codes of 8 bits are signed: their offset is gone.
                if B::CODE_BITS != 8 {
                    let sum = if B::STRETCH_SUBS == 1 { x.sum } else { x.halves[sub] };
                    *total = simd.mul_add(min, simd.splat(sum), *total);
                }
            }
        }
    }
    totals
}

/// Asks for the element `by` after the first of a slice, which may lie beyond its end.
#[inline(always)]
fn ahead<S: Simd, T>(simd: S, slice: &[T], by: usize) {
    simd.prefetch(slice.as_ptr().wrapping_add(by).cast());
}
