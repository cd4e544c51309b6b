//! The quantizer against the packed result of the authors' own PyTorch code, where the vectors are
//! at hand (`../shared/golden/kivi_quantizer.safetensors` beside the repository).
//!
//! Their code divides by the unrounded f32 scale, ours by the stored f16 one: scales and zeros agree
//! to one f16 step, and all but a few codes are equal, none off by more than one.

use half::f16;
use kivi_core::{Bits, PackedKeys, PackedValues, code_at};
use safetensors::{SafeTensors, tensor::TensorView};
use std::path::Path;

fn f32s(view: &TensorView<'_>) -> Vec<f32> {
    match view.dtype() {
        safetensors::Dtype::F32 => {
            view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        }
        safetensors::Dtype::F16 => {
            view.data().as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        safetensors::Dtype::BF16 => {
            let chunks = view.data().as_chunks::<2>().0.iter();
            chunks.map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
        }
        other => panic!("unexpected type {other:?}"),
    }
}

fn words(view: &TensorView<'_>) -> Vec<u32> {
    view.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Equal to one step of f16 at their size.
fn params_close(ours: &[f16], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(theirs) {
        let step = (b.abs() * 2f32.powi(-10)).max(2f32.powi(-24));
        // A scale below the smallest normal f16 is stored as 0.
        let limit = if b.abs() < f16::MIN_POSITIVE.to_f32() { b.abs() } else { step };
        assert!((a.to_f32() - b).abs() <= limit, "{what}: {a}, not {b}");
    }
}

fn codes_close(bits: Bits, ours: &[u32], theirs: &[u32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let (mut equal, mut total) = (0, 0);
    for (a, b) in ours.iter().zip(theirs) {
        for i in 0..bits.codes_per_word() {
            let (a, b) = (code_at(bits, &[*a], i), code_at(bits, &[*b], i));
            assert!(a.abs_diff(b) <= 1, "{what}: code {a}, theirs {b}");
            equal += usize::from(a == b);
            total += 1;
        }
    }
    let share = equal as f64 / total as f64;
    println!("{what}: {:.3} % of {total} codes equal", 100.0 * share);
    let least = if bits == Bits::Eight { 0.97 } else { 0.995 };
    assert!(share >= least, "{what}: only {share} of the codes are equal");
}

#[test]
fn codes_of_the_authors_quantizer() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = root.join("../shared/golden/kivi_quantizer.safetensors");
    let Ok(bytes) = std::fs::read(&path) else {
        println!("skipped: no ../shared/golden/kivi_quantizer.safetensors");
        return;
    };
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names = file.names();
    let cases: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(".k_codes")).collect();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let tensor = |name: &str| file.tensor(&format!("{case}.{name}")).unwrap();
        let shape = tensor("k").shape().to_vec();
        let [1, heads, tokens, head_dim] = shape[..] else { panic!("{case}: {shape:?}") };
        let (code_rows, groups) = (tensor("k_codes").shape()[2], tensor("k_scale").shape()[2]);
        let bits = Bits::ALL.into_iter().find(|b| b.get() == code_rows * 32 / tokens).unwrap();
        let (group, shape) = (tokens / groups, [heads, tokens, head_dim]);

        let keys = PackedKeys::quantize(bits, group, shape, &f32s(&tensor("k"))).unwrap();
        params_close(&keys.scales, &f32s(&tensor("k_scale")), case);
        params_close(&keys.zeros, &f32s(&tensor("k_zero")), case);
        codes_close(bits, &keys.codes, &words(&tensor("k_codes")), &format!("{case} keys"));

        let values = PackedValues::quantize(bits, group, shape, &f32s(&tensor("v"))).unwrap();
        params_close(&values.scales, &f32s(&tensor("v_scale")), case);
        params_close(&values.zeros, &f32s(&tensor("v_zero")), case);
        codes_close(bits, &values.codes, &words(&tensor("v_codes")), &format!("{case} values"));
    }
}
