//! Instruction sets: chosen at run time, one generic algorithm for all of them.
//!
//! A kernel is written once, over the vector operations of [`Simd`]: sixteen f32 or 32-bit integer
//! lanes, and a few operations on bytes. Each instruction set is a zero-sized token that implements
//! the trait and *can be obtained only where the processor has the instructions*; that makes every
//! method safe to call. What remains is to compile the kernel with the instructions enabled, which is
//! the only thing [`Isa::run`] does:
//!
//! ```ignore
//! struct Dot<'a> { a: &'a [f32], b: &'a [f32] }
//! impl Kernel for Dot<'_> {
//!     type Output = f32;
//!     #[inline(always)] // into the shell that enables the instructions
//!     fn run<S: Simd>(self, simd: S) -> f32 { slices::dot(simd, self.a, self.b) }
//! }
//! let y = isa.run(Dot { a, b });
//! ```
//!
//! **Everything between `Kernel::run` and the trait's methods must be `#[inline(always)]`.** A
//! function that is not inlined into the shell is still correct, but compiled for the baseline, with
//! a call for every vector operation. That holds for library functions as well: in hot loops write
//! `for` loops, not `array::map` or `array::from_fn`, which the compiler does not always inline
//! (*measured*: unpacking weights took twice as long). Enter the shell once per task of work, not
//! once per vector.
//!
//! Results are deterministic for a given instruction set: every reduction has a fixed order, and no
//! operation depends on a lane's position. Between instruction sets integers agree exactly and
//! floats up to the rounding of [`Simd::mul_add`], which is fused only where the hardware fuses
//! (`f32::mul_add` on a machine without the instruction calls a slow library function).
//!
//! A new instruction set is a file beside `avx2.rs` and a line in each `match` and list below.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod portable;
mod simd;
pub(crate) mod slices;
#[cfg(test)]
mod tests;

pub(crate) use simd::{Bytes64, LANES, Simd};

#[cfg(target_arch = "x86_64")]
use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
use kivi_core::{Error, Result};
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
use neon::Neon;
use portable::Portable;

/// An instruction set this processor has; there is no value for one that it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Token);

/// The tokens of all instruction sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    /// Plain Rust, on every processor.
    Portable(Portable),
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI as well.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 64-bit Arm with NEON and the dot product extension.
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon(Neon),
}

impl Isa {
    /// The environment variable that overrides [`Isa::detect`].
    pub const VARIABLE: &'static str = "KIVI_CPU_ISA";

    /// The instruction set that works everywhere.
    pub const PORTABLE: Self = Self(Token::Portable(Portable));

    /// The fastest instruction set of this processor, or the one named by the environment variable
    /// `KIVI_CPU_ISA` (`portable`, `avx2`, `avx512`, `neon`).
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the variable names no instruction set, [`Error::Unsupported`]
    /// when it names one that this processor lacks.
    pub fn detect() -> Result<Self> {
        match std::env::var_os(Self::VARIABLE) {
            Some(name) => Self::named(&name.to_string_lossy()),
            None => Ok(Self::available().last().unwrap_or(Self::PORTABLE)),
        }
    }

    /// Every instruction set this processor has, the fastest last.
    pub fn available() -> impl Iterator<Item = Self> {
        let sets = [
            Some(Self::PORTABLE),
            #[cfg(target_arch = "x86_64")]
            Avx2::new().map(|token| Self(Token::Avx2(token))),
            #[cfg(target_arch = "x86_64")]
            Avx512::new().map(|token| Self(Token::Avx512(token))),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Neon::new().map(|token| Self(Token::Neon(token))),
        ];
        sets.into_iter().flatten()
    }

    /// The instruction set of that name.
    ///
    /// # Errors
    /// As for [`Isa::detect`].
    pub fn named(name: &str) -> Result<Self> {
        const KNOWN: [&str; 4] = ["portable", "avx2", "avx512", "neon"];
        if let Some(isa) = Self::available().find(|isa| isa.name() == name) {
            return Ok(isa);
        }
        if KNOWN.contains(&name) {
            let what = format!("instruction set {name} on this processor");
            return Err(Error::Unsupported { backend: "cpu", what });
        }
        Err(Error::config(Self::VARIABLE, name, KNOWN.join(" or ")))
    }

    /// Its name, as `KIVI_CPU_ISA` spells it.
    pub const fn name(self) -> &'static str {
        match self.0 {
            Token::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Token::Neon(_) => "neon",
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Token::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(simd) => simd.call(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(simd) => simd.call(kernel),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Token::Neon(simd) => simd.call(kernel),
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A computation written over [`Simd`]: a struct of its arguments, since closures cannot be generic.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}
