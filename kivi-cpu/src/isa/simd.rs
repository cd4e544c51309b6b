//! The vector operations kernels are written in.

use super::Kernel;

/// f32 or 32-bit lanes of a vector, which is as long as a cache line: a register of AVX-512, two of
/// AVX2, four of NEON.
pub(crate) const LANES: usize = 16;

/// The bytes of a vector in memory, aligned so that no load crosses a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Bytes64(pub(crate) [u8; 64]);

impl Bytes64 {
    pub(crate) const ZERO: Self = Self([0; 64]);
}

/// Vectors of [`LANES`] lanes in one instruction set. The implementing type is the proof that the
/// processor has it (see the module documentation of `isa`). Implementations are `#[inline(always)]`.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// How many vectors the registers hold.
    const REGISTERS: usize;

    /// f32 lanes.
    type F32: Copy;
    /// 32-bit integer lanes; operations that distinguish treat them as unsigned, except
    /// [`i32_to_f32`](Self::i32_to_f32).
    type I32: Copy;
    /// Sums of [`dot4`](Self::dot4) that have not been widened to [`I32`](Self::I32) yet.
    type Dots: Copy;

    /// Runs a part of a kernel as a function of its own, compiled for the instruction set: large
    /// kernels compile faster and keep their sums in registers if they are cut into such parts.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F32;
    /// Lanes from memory.
    fn load(self, x: &[f32; LANES]) -> Self::F32;
    /// Lanes to memory.
    fn store(self, x: Self::F32, out: &mut [f32; LANES]);
    /// Little-endian f32 from memory.
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32;
    /// Little-endian f16 from memory, exactly.
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32;
    /// Little-endian bf16 from memory, exactly.
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32;

    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a − b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a·b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a·b + c`, rounded once where the instruction set has it, else twice.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `if a > b { a } else { b }`: the second operand where one is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `if a < b { a } else { b }`: the second operand where one is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The largest lane; NaN lanes may be skipped.
    fn max_lane(self, x: Self::F32) -> f32;
    /// Sum of the lanes: the upper half is added to the lower one until one lane is left.
    fn sum(self, x: Self::F32) -> f32;

    /// `x` in every lane.
    fn splat_u32(self, x: u32) -> Self::I32;
    /// Lanes from memory.
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32;
    /// `x >> by`, the same `by < 32` for every lane.
    fn shr(self, x: Self::I32, by: u32) -> Self::I32;
    /// `x << by`, the same `by < 32` for every lane.
    fn shl(self, x: Self::I32, by: u32) -> Self::I32;
    /// `a & b`.
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a + b`, wrapping.
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a − b`, wrapping.
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// The nearest f32 of each lane read as i32.
    fn i32_to_f32(self, x: Self::I32) -> Self::F32;
    /// The lanes' bits as floats.
    fn bits_to_f32(self, x: Self::I32) -> Self::F32;
    /// The floats' bits.
    fn f32_to_bits(self, x: Self::F32) -> Self::I32;

    // Integer inner products, of the cache's codes and of weights.

    /// How many [`dot4`](Self::dot4) of codes of `bits` bits may be added up before
    /// [`widen`](Self::widen).
    fn depth(bits: u32) -> usize;
    /// No products yet.
    fn no_dots(self) -> Self::Dots;
    /// Adds `Σ_j codes[4·o + j]·x[4·o + j]` to lane `o`, exactly; vectors are read as 32 bytes.
    ///
    /// Codes have `bits` bits: up to 6 unsigned, or 8, two's complement. `x` is not −128 if codes are
    /// signed.
    fn dot4(self, bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots;
    /// The sums as 32-bit lanes.
    fn widen(self, sums: Self::Dots) -> Self::I32;
    /// Splits 32 numbers `x`, at most `127·2^SHIFT`, rounded to the nearest integer, into bytes with
    /// `x = 2^SHIFT·high + low`, `low` in `−2^SHIFT/2 … 2^SHIFT/2 − 1`, in the order of the elements.
    /// `SHIFT` is 7 or 8. Writes `[high, low]`, returns lane sums that add up to `Σ x`.
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 2], out: &mut [[u32; 8]; 2]) -> Self::I32;
    /// Lanes to memory.
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]);
    /// `|x|`.
    fn abs(self, x: Self::F32) -> Self::F32;
    /// All bits of every lane in which `a < b`.
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32;
    /// All bits of every lane in which `a ≤ b`.
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32;
    /// Asks for the cache line at an address that will be read soon; any address will do.
    fn prefetch(self, address: *const u8);

    /// `e^x`, relative error below 2·10⁻⁷ (a few units more where the result is subnormal).
    ///
    /// −∞ and everything below −104 give 0, everything above 88.73 gives +∞, NaN gives NaN. A lane's
    /// result depends on its value only.
    #[inline(always)]
    fn exp(self, x: Self::F32) -> Self::F32 {
        // With x second, NaN passes.
        let x = self.min(self.splat(89.0), self.max(self.splat(-104.0), x));
        // n = round(x / ln 2): adding 1.5·2²³ leaves the integer in the low bits.
        let magic = self.splat(12_582_912.0);
        let biased = self.mul_add(x, self.splat(std::f32::consts::LOG2_E), magic);
        let n = self.sub(biased, magic);
        // r = x − n·ln 2 in two parts, the first exact for |n| < 2⁹; polynomial of Cephes' expf.
        let r = self.mul_add(n, self.splat(-0.693_359_4), x);
        let r = self.mul_add(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = self.mul_add(p, r, self.splat(c));
        }
        let p = self.add(self.mul_add(p, self.mul(r, r), r), self.splat(1.0));
        // 2ⁿ as 2^(n/2)·2^(n − n/2), since n reaches from −150 to 128.
        let n = self.sub_u32(self.f32_to_bits(biased), self.splat_u32(12_582_912_f32.to_bits()));
        // n + 300 is positive, so that the logical shift halves it.
        let half = self.shr(self.add_u32(n, self.splat_u32(300)), 1);
        let half = self.sub_u32(half, self.splat_u32(150));
        let power = |n| self.bits_to_f32(self.shl(self.add_u32(n, self.splat_u32(127)), 23));
        self.mul(self.mul(p, power(half)), power(self.sub_u32(n, half)))
    }

    // Weights.

    /// Bytes from memory; lane `o` holds the bytes `4·o …`.
    fn load_bytes(self, x: &Bytes64) -> Self::I32;
    /// The values of signed bytes.
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32;
}
