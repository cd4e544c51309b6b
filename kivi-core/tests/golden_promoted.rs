//! Promoted key channels against `tools/golden_promoted.py`, which computes codes in exact rational
//! arithmetic: masks, both planes, scales and zeros, bit for bit.

use half::f16;
use kivi_core::{PackedKeys, Promotion};
use safetensors::{SafeTensors, tensor::TensorView};

const GOLDEN: &[u8] = include_bytes!("golden/promoted_keys.safetensors");

fn words(view: &TensorView<'_>) -> Vec<u32> {
    view.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// f16 by its bits, since a zero may be NaN.
fn halves(view: &TensorView<'_>) -> Vec<u16> {
    view.data().as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
}

fn floats(view: &TensorView<'_>) -> Vec<f32> {
    match view.dtype() {
        safetensors::Dtype::F16 => {
            halves(view).into_iter().map(|bits| f16::from_bits(bits).to_f32()).collect()
        }
        _ => words(view).into_iter().map(f32::from_bits).collect(),
    }
}

fn bits(x: &[f16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn packed_keys_equal_the_numpy_ones() {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    // Group size and share, as in the script.
    for (case, group_size, promotion) in [
        ("outliers", 16, Promotion::QUARTER),
        ("outliers_eighth", 32, Promotion::EIGHTH),
        ("damaged", 64, Promotion::QUARTER),
        ("ties", 128, Promotion::EIGHTH),
        ("wide", 32, Promotion::QUARTER),
    ] {
        let tensor = |name: &str| file.tensor(&format!("{case}.{name}")).unwrap();
        let [heads, tokens, head_dim] = tensor("k").shape().try_into().unwrap();
        let keys = floats(&tensor("k"));
        let shape = [heads, tokens, head_dim];
        let packed = PackedKeys::quantize_promoted(promotion, group_size, shape, &keys).unwrap();
        let promoted = packed.promoted.as_ref().unwrap();
        assert_eq!(promoted.count, tensor("lo").shape()[2], "{case}");
        assert_eq!(promoted.mask, words(&tensor("mask")), "{case}: mask");
        assert_eq!(bits(&packed.scales), halves(&tensor("scale")), "{case}: scales");
        assert_eq!(bits(&packed.zeros), halves(&tensor("zero")), "{case}: zeros");
        assert_eq!(packed.codes, words(&tensor("codes")), "{case}: upper plane");
        assert_eq!(promoted.lo, words(&tensor("lo")), "{case}: lower plane");
    }
}
