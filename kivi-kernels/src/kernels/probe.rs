//! What a device does with numbers, found out when it is opened.

use cubecl::prelude::*;

/// `out[i]` is a code `i` read as a denormal f32, made a normal number by a multiplication: `i` where
/// denormals are kept, 0 where they are flushed.
#[cube(launch_unchecked)]
pub(crate) fn denormals(codes: &Array<u32>, out: &mut Array<f32>) {
    let i = ABSOLUTE_POS;
    if i < codes.len() {
        // 2⁶⁴ and 2⁸⁵: the unit of a denormal is 2⁻¹⁴⁹.
        let product = f32::reinterpret(codes[i]) * 18_446_744_073_709_551_616.0f32;
        out[i] = product * 38_685_626_227_668_133_590_597_632.0f32;
    }
}
