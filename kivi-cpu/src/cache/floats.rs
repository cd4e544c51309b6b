//! Full-precision elements in one of the three store types.

use crate::isa::{Simd, slices};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use kivi_core::StoreDtype;
use std::ops::Range;

/// Elements rounded at once.
const CHUNK: usize = 64;

/// Stores every `stride`-th element of `out`, rounded in vectors; what `saturate` replaces, if it was
/// finite, is counted.
fn write_rounded<T: Copy + Default>(
    out: &mut [T],
    stride: usize,
    x: &[f32],
    saturate: impl Fn(T) -> Option<T>,
) -> u64
where
    [T]: HalfFloatSliceExt,
{
    let mut saturated = 0;
    let mut places = out.iter_mut().step_by(stride);
    for x in x.chunks(CHUNK) {
        let mut rounded = [T::default(); CHUNK];
        let rounded = &mut rounded[..x.len()];
        rounded.convert_from_f32_slice(x);
        for ((&mut rounded, &x), place) in rounded.iter_mut().zip(x).zip(&mut places) {
            *place = match saturate(rounded).filter(|_| x.is_finite()) {
                Some(largest) => {
                    saturated += 1;
                    largest
                }
                None => rounded,
            };
        }
    }
    saturated
}

/// A buffer of keys or values in their store type.
#[derive(Clone, Debug)]
pub(crate) enum Floats {
    F16(Box<[f16]>),
    Bf16(Box<[bf16]>),
    F32(Box<[f32]>),
}

impl Floats {
    pub(crate) fn zeroed(dtype: StoreDtype, elements: usize) -> Self {
        match dtype {
            StoreDtype::F16 => Self::F16(vec![f16::ZERO; elements].into()),
            StoreDtype::Bf16 => Self::Bf16(vec![bf16::ZERO; elements].into()),
            StoreDtype::F32 => Self::F32(vec![0.0; elements].into()),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::F16(x) => size_of_val::<[f16]>(x),
            Self::Bf16(x) => size_of_val::<[bf16]>(x),
            Self::F32(x) => size_of_val::<[f32]>(x),
        }
    }

    /// Stores `x` at `start`, `start + stride`, …, rounded; returns how many finite elements had
    /// to be saturated.
    pub(crate) fn write(&mut self, start: usize, stride: usize, x: &[f32]) -> u64 {
        match self {
            Self::F16(out) => {
                let saturated = |x: f16| x.is_infinite().then(|| f16::MAX.copysign(x));
                write_rounded(&mut out[start..], stride, x, saturated)
            }
            Self::Bf16(out) => {
                let saturated = |x: bf16| x.is_infinite().then(|| bf16::MAX.copysign(x));
                write_rounded(&mut out[start..], stride, x, saturated)
            }
            Self::F32(out) => {
                for (out, &x) in out[start..].iter_mut().step_by(stride).zip(x) {
                    *out = x;
                }
                0
            }
        }
    }

    /// The elements of a range as f32, exactly.
    #[inline(always)]
    pub(crate) fn load<S: Simd>(&self, simd: S, range: Range<usize>, out: &mut [f32]) {
        match self {
            Self::F16(x) => slices::f16_to_f32(simd, bytemuck::cast_slice(&x[range]), out),
            Self::Bf16(x) => {
                for (out, x) in out.iter_mut().zip(&x[range]) {
                    *out = x.to_f32();
                }
            }
            Self::F32(x) => out[..range.len()].copy_from_slice(&x[range]),
        }
    }

    /// Asks for the cache lines of a range that will be read soon; it need not exist.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd>(&self, simd: S, range: Range<usize>) {
        let (base, size): (*const u8, _) = match self {
            Self::F16(x) => (x.as_ptr().cast(), size_of::<f16>()),
            Self::Bf16(x) => (x.as_ptr().cast(), size_of::<bf16>()),
            Self::F32(x) => (x.as_ptr().cast(), size_of::<f32>()),
        };
        for byte in (range.start * size..range.end * size).step_by(64) {
            simd.prefetch(base.wrapping_add(byte));
        }
    }

    /// One element as f32, exactly.
    pub(crate) fn get(&self, index: usize) -> f32 {
        match self {
            Self::F16(x) => x[index].to_f32(),
            Self::Bf16(x) => x[index].to_f32(),
            Self::F32(x) => x[index],
        }
    }

    /// Copies `length` elements from another buffer of the same type.
    pub(crate) fn copy_from(&mut self, to: usize, source: &Self, from: usize, length: usize) {
        match (self, source) {
            (Self::F16(a), Self::F16(b)) => {
                a[to..to + length].copy_from_slice(&b[from..from + length]);
            }
            (Self::Bf16(a), Self::Bf16(b)) => {
                a[to..to + length].copy_from_slice(&b[from..from + length]);
            }
            (Self::F32(a), Self::F32(b)) => {
                a[to..to + length].copy_from_slice(&b[from..from + length]);
            }
            _ => debug_assert!(false, "buffers of one tensor have one type"),
        }
    }
}
