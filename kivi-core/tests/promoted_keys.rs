//! Promoted key channels: a group computed on paper, the algebra of the two planes, and the bytes.

use half::f16;
use kivi_core::*;
use proptest::prelude::*;

/// Sixteen tokens of four channels, of which ⌈0.25 · 4⌉ = 1 is promoted:
///
/// - 0 is constant;
/// - 1 counts from 0 to 15: range 15, 4-bit scale 1, stored as 4, and the codes are the numbers;
/// - 2 counts 0, 1, 2, 3, 0, …: range 3, scale 1;
/// - 3 counts from 15 to 0: the same range as 1, but a higher channel, so 2 bits with scale 5.
#[test]
fn a_group_computed_on_paper() {
    let keys: Vec<f32> =
        (0..16).flat_map(|t| [5, t, t % 4, 15 - t]).map(|x: u8| f32::from(x)).collect();
    let packed = PackedKeys::quantize_promoted(Promotion::QUARTER, 16, [1, 16, 4], &keys).unwrap();
    let promoted = packed.promoted.as_ref().unwrap();
    assert_eq!((promoted.count, &promoted.mask[..]), (1, &[0b0010][..]));
    assert_eq!(packed.scales, [0.0, 4.0, 1.0, 5.0].map(f16::from_f32));
    assert_eq!(packed.zeros, [5.0, 0.0, 0.0, 0.0].map(f16::from_f32));
    // hi of channel 1 is t/4, lo is t mod 4. 15 − t in steps of 5, to the nearest:
    // 3 3 3 2 2 2 2 2 1 1 1 1 1 0 0 0.
    assert_eq!(packed.codes, [0, 0xFFAA_5500, 0xE4E4_E4E4, 0x0155_AABF]);
    assert_eq!(promoted.lo, [0xE4E4_E4E4]);
    // Token 7: hi = 1, lo = 3. Without the second plane it reads as 4.
    assert_eq!((packed.code(0, 7, 1), packed.lo_code(0, 7, 1)), (1, Some(3)));
    assert_eq!((packed.promoted_code(0, 7, 1), packed.dequantize(0, 7, 1)), (Some(7), 7.0));
    assert_eq!(packed.params(0, 0, 1).dequantize(packed.code(0, 7, 1)), 4.0);
    assert_eq!([0, 2, 3].map(|channel| packed.dequantize(0, 7, channel)), [5.0, 3.0, 10.0]);
    assert_eq!([0, 2, 3].map(|channel| packed.lo_code(0, 7, channel)), [None; 3]);
}

#[test]
fn zeros_promote_the_lowest_channels() {
    let format = Format::KIVI2.promote(0.125).unwrap();
    let shape = [2, 64, 72];
    let zeroed = PackedKeys::zeroed_for(format, 32, shape).unwrap().unwrap();
    let keys = vec![0.0; 2 * 64 * 72];
    let quantized = PackedKeys::quantize_promoted(Promotion::EIGHTH, 32, shape, &keys).unwrap();
    assert_eq!(zeroed, quantized);
    // ⌈72 / 8⌉ = 9 of three words.
    assert_eq!(zeroed.mask(1, 1).unwrap(), [0x1FF, 0, 0]);
    assert_eq!(PackedKeys::zeroed_for(Format::F16, 32, shape).unwrap(), None);
    let plain = PackedKeys::zeroed_for(Format::KIVI2, 32, shape).unwrap();
    assert_eq!(plain, Some(PackedKeys::zeroed(Bits::Two, 32, shape).unwrap()));
}

/// Channels whose sizes differ by powers of two, some of them equal, some broken.
fn channel_keys(tokens: usize, head_dim: usize) -> impl Strategy<Value = Vec<f32>> {
    let element = prop_oneof![
        40 => -4f32..4.0,
        10 => (-3i8..=3).prop_map(f32::from),
        1 => prop::sample::select(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65504.0]),
    ];
    let sizes = prop::collection::vec(-16i32..4, head_dim);
    (prop::collection::vec(element, tokens * head_dim), sizes).prop_map(move |(keys, sizes)| {
        let scaled = |(i, x): (usize, f32)| x * 2f32.powi(sizes[i % head_dim]);
        let round = |x| StoreDtype::F16.round(x);
        keys.into_iter().enumerate().map(scaled).map(round).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Promoted channels are exactly those of a 4-bit cache, the others those of a 2-bit cache; and
    /// no other channel has a larger range than a promoted one.
    #[test]
    fn promoted_channels_have_4_bits_and_the_others_2(
        (head_dim, keys) in prop::sample::select(&[1usize, 20, 33, 72])
            .prop_flat_map(|head_dim| (Just(head_dim), channel_keys(2 * 64, head_dim))),
        group_size in prop::sample::select(&[16usize, 32, 64]),
        share in prop::sample::select(&[0.0001, 0.125, 0.25, 0.5, 1.0]),
    ) {
        let shape = [2, 64, head_dim];
        let promotion = Promotion::share(share).unwrap();
        let packed = PackedKeys::quantize_promoted(promotion, group_size, shape, &keys).unwrap();
        let two = PackedKeys::quantize(Bits::Two, group_size, shape, &keys).unwrap();
        let four = PackedKeys::quantize(Bits::Four, group_size, shape, &keys).unwrap();
        let count = (share * head_dim as f64).ceil() as usize;
        for head in 0..2 {
            for group in 0..64 / group_size {
                let tokens = group * group_size..(group + 1) * group_size;
                let range = |channel: usize| {
                    let at = |t: usize| keys[(head * 64 + t) * head_dim + channel];
                    quantizer::range(tokens.clone().map(at))
                };
                let is_promoted = |&channel: &usize| packed.is_promoted(head, group, channel);
                let (promoted, others): (Vec<_>, Vec<_>) =
                    (0..head_dim).partition(is_promoted);
                prop_assert_eq!(promoted.len(), count);
                for &a in &promoted {
                    for &b in &others {
                        prop_assert!(range(a) > range(b) || (range(a) == range(b) && a < b));
                    }
                }
                for token in tokens.clone() {
                    for &channel in &promoted {
                        let code = packed.promoted_code(head, token, channel).unwrap();
                        prop_assert_eq!(code, four.code(head, token, channel));
                        let (a, b) = (&packed, &four);
                        let read = [a, b].map(|keys| keys.dequantize(head, token, channel));
                        prop_assert_eq!(read[0].to_bits(), read[1].to_bits());
                    }
                    for &channel in &others {
                        prop_assert_eq!(packed.promoted_code(head, token, channel), None);
                        let code = packed.code(head, token, channel);
                        prop_assert_eq!(code, two.code(head, token, channel));
                        let read = [&packed, &two].map(|keys| keys.dequantize(head, token, channel));
                        prop_assert_eq!(read[0].to_bits(), read[1].to_bits());
                    }
                }
            }
        }
        // Group by group into other places and back: nothing is lost.
        let groups = 64 / group_size;
        let format = Format::KIVI2.with_promotion(promotion).unwrap();
        let mut turned = PackedKeys::zeroed_for(format, group_size, shape).unwrap().unwrap();
        let mut back = turned.clone();
        (0..groups).for_each(|group| turned.copy_group(groups - 1 - group, &packed, group));
        (0..groups).for_each(|group| back.copy_group(groups - 1 - group, &turned, group));
        let bits = |x: &[f16]| -> Vec<u16> { x.iter().map(|x| x.to_bits()).collect() };
        prop_assert_eq!(&back.codes, &packed.codes);
        prop_assert_eq!(&back.promoted, &packed.promoted);
        prop_assert_eq!(bits(&back.scales), bits(&packed.scales));
        prop_assert_eq!(bits(&back.zeros), bits(&packed.zeros));
    }
}

fn pool(share: f64, head_dim: usize, group_size: usize) -> PoolSpec {
    let key = Format::KIVI2.promote(share).unwrap();
    let config = CacheConfig::builder().key(key).group_size(group_size).build().unwrap();
    let layer = LayerSpec::new(&config, 2, head_dim);
    PoolSpec::for_context(config, vec![layer], 1, 8192).unwrap()
}

/// `b + p·2 + 32/G + 1/G` bits per element where the channels divide evenly.
#[test]
fn bits_per_element_of_keys() {
    for (share, group_size, bits) in [
        (0.25, 32, 2.0 + 2.0 * 0.25 + 32.0 / 32.0 + 1.0 / 32.0),
        (0.125, 32, 3.28125),
        (0.25, 64, 2.0 + 0.5 + 0.5 + 1.0 / 64.0),
        (1.0, 128, 4.0 + 0.25 + 1.0 / 128.0),
    ] {
        let (pool, tokens) = (pool(share, 128, group_size), KeyValue::new(4096, 0));
        let layer = &pool.layers()[0];
        let bytes = pool.code_bytes(layer, tokens)
            + pool.param_bytes(layer, tokens)
            + pool.mask_bytes(layer, tokens);
        assert_eq!(8.0 * bytes as f64 / f64::from(2 * 4096 * 128), bits);
    }
}

/// The formulas are the lengths of the arrays, also where a mask ends inside a word.
#[test]
fn bytes_are_those_of_the_arrays() {
    for (share, head_dim, group_size) in [(0.25, 72, 32), (0.125, 20, 16), (0.1, 128, 128)] {
        let (pool, tokens) = (pool(share, head_dim, group_size), KeyValue::new(256, 0));
        let layer = &pool.layers()[0];
        let keys = PackedKeys::zeroed_for(layer.format.keys, group_size, [2, 256, head_dim]);
        let keys = keys.unwrap().unwrap();
        let promoted = keys.promoted.unwrap();
        assert_eq!(promoted.count, (share * head_dim as f64).ceil() as usize);
        let codes = 4 * (keys.codes.len() + promoted.lo.len());
        assert_eq!(pool.code_bytes(layer, tokens), codes);
        assert_eq!(pool.param_bytes(layer, tokens), 2 * (keys.scales.len() + keys.zeros.len()));
        assert_eq!(pool.mask_bytes(layer, tokens), 4 * promoted.mask.len());
    }
}

/// The prediction counts masks on their own: 4,096 tokens, 128 groups of 32, 2 kv heads.
#[test]
fn prediction_counts_masks() {
    let pool = pool(0.25, 128, 32);
    let usage = memory::predict(&pool, &KiviPolicy::new(pool.config()), 4096);
    assert_eq!(usage.channel_masks, 128 * 2 * 4 * 4);
    let (keys, values) = (4096 * 2 * 128 * 5 / 16, 3968 * 2 * 128 / 4);
    assert_eq!(usage.codes, keys + values);
    assert_eq!(usage.residual, 128 * 2 * 128 * 2);
    assert_eq!(memory::MeasuredBytes::from(usage).in_use(), usage.in_use());
}
