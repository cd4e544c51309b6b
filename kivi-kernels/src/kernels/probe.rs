//! What a device does with numbers, found out when it is opened.

use cubecl::prelude::*;

/// `out[i]` is a code `i` read as a denormal f32, made a normal number by a multiplication: `i` where
/// denormals are kept, 0 where they are flushed.
#[cube(launch_unchecked)]
pub(crate) fn denormals(codes: &Array<u32>, factors: &Array<f32>, out: &mut Array<f32>) {
    let i = ABSOLUTE_POS;
    if i < codes.len() {
        // The two factors multiply to 2¹⁴⁹, the unit of a denormal being 2⁻¹⁴⁹; no number holds that, so
        // the compiler must not join them either.
        out[i] = f32::reinterpret(codes[i]) * factors[0] * factors[1];
    }
}

/// `out[i]` is the sum of the two halves of a word read as a pair of f16. WGSL cannot say that.
#[cube(launch_unchecked)]
pub(crate) fn pairs(words: &Array<u32>, out: &mut Array<f32>) {
    let i = ABSOLUTE_POS;
    if i < words.len() {
        let pair = Vector::<half::f16, Const<2>>::reinterpret(words[i]);
        out[i] = f32::cast_from(pair[0]) + f32::cast_from(pair[1]);
    }
}
