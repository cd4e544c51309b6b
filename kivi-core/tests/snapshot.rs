//! The file format of snapshots against `tools/golden_snapshot.py`, which writes it from its
//! description; and everything that can be wrong with a file.

use kivi_core::{
    Bits, CacheConfig, CacheConfigBuilder, CanonicalLayer, Error, Format, KeyValue, KiviPolicy,
    LayerSpec, ModelIdentity, PoolSpec, Promotion, RopeStyle, Snapshot, SnapshotError, StoreDtype,
    ValueResidual,
};
use sha2::{Digest, Sha256};
use std::io::{self, Write};

const GOLDEN: &[u8] = include_bytes!("golden/snapshot.kivi");

/// Signature, version and length; the header after it; its checksum.
const PREAMBLE: usize = 16;
const HEADER: usize = 124 + 4 * 8 + 28 * 2;
const TOKEN_IDS: usize = PREAMBLE + HEADER + 32;
const LAYERS: usize = TOKEN_IDS + 4 * 76;

fn golden() -> Snapshot {
    Snapshot::read_from(GOLDEN).unwrap()
}

fn read(bytes: &[u8]) -> Result<Snapshot, SnapshotError> {
    Snapshot::read_from(bytes).map_err(|error| match error {
        Error::Snapshot(error) => {
            assert!(!error.to_string().contains('\n'), "{error}");
            error
        }
        other => panic!("{other}"),
    })
}

/// The formulas of the script.
fn word(k: usize, array: u64, layer: u64) -> u32 {
    (2_654_435_761 * k as u64 + 65_537 * array + 257 * layer) as u32
}

fn float(k: usize, array: usize, layer: usize) -> f32 {
    ((k + 7 * array + 3 * layer) % 97) as f32 / 8.0 - 6.0
}

fn config() -> CacheConfigBuilder {
    CacheConfig::builder()
        .group_size(16)
        .residual_length(32)
        .sink_length(3)
        .rollback_length(40)
        .page_tokens(16)
        .segment_tokens(Some(64))
        .value(Format::KIVI4)
}

fn layers() -> Vec<LayerSpec> {
    let promoted = Format::KIVI2.with_promotion(Promotion::QUARTER).unwrap();
    let four = Format::new(Some(Bits::Four), StoreDtype::Bf16);
    let layer = |keys, values, window| LayerSpec {
        kv_heads: 2,
        head_dim: 20,
        format: KeyValue::new(keys, values),
        window,
    };
    vec![layer(promoted, four, None), layer(Format::F32, Format::KIVI8, Some(50))]
}

#[test]
fn golden_file_is_read() {
    let snapshot = golden();
    let header = snapshot.header();
    assert_eq!(header.model.fingerprint.to_vec(), (0..32).collect::<Vec<u8>>());
    let rope = &header.model.rope;
    assert_eq!((rope.style, rope.attention_factor), (RopeStyle::Interleaved, 1.25));
    assert_eq!(rope.frequencies.len(), 8);
    assert!((rope.frequencies[4] - 0.01).abs() < 1e-9, "10,000 to the power of −8/16");
    assert_eq!(header.model.key_bias_beside, [true, false]);
    assert_eq!(header.config, config().build().unwrap());
    assert_eq!(header.layers, layers());
    assert_eq!(snapshot.tokens(), (0..76).map(|i| 1000 + 3 * i).collect::<Vec<u32>>());
    assert_eq!(header.packed, KeyValue::new(67, 44));
    assert_eq!(header.kept, KeyValue::new(35, 4));

    let [first, second] = snapshot.layers() else { panic!("two layers") };
    let keys = first.packed_keys.as_ref().unwrap();
    let promoted = keys.promoted.as_ref().unwrap();
    let values = first.packed_values.as_ref().unwrap();
    assert_eq!((keys.tokens, keys.codes.len(), promoted.count), (64, 2 * 4 * 20, 5));
    assert!(keys.codes.iter().enumerate().all(|(k, &x)| x == word(k, 2, 0)));
    assert!(keys.scales.iter().enumerate().all(|(k, x)| x.to_f32() == float(k, 3, 0)));
    assert!(keys.zeros.iter().enumerate().all(|(k, x)| x.to_f32() == float(k, 4, 0)));
    assert!((0..4).all(|group| keys.mask(1, group) == Some(&[0b11111 << (group + 1)])));
    assert!(promoted.lo.iter().enumerate().all(|(k, &x)| x == word(k, 6, 0)));
    assert_eq!((values.tokens, values.codes.len(), values.scales.len()), (41, 246, 164));
    assert!(
        values
            .codes
            .iter()
            .enumerate()
            .all(|(k, &x)| { x == word(k, 7, 0) & if k % 3 == 2 { 0xFFFF } else { u32::MAX } })
    );
    let data = [
        (&first.sinks.keys, 0, 3, 0, 0),
        (&first.sinks.values, 0, 3, 1, 0),
        (&first.full.keys, 35, 41, 10, 0),
        (&first.full.values, 4, 72, 11, 0),
        (&second.sinks.keys, 0, 3, 0, 1),
        (&second.full.keys, 3, 73, 5, 1),
        (&second.full.values, 4, 72, 6, 1),
    ];
    for (tokens, from, count, array, layer) in data {
        assert_eq!((tokens.first, tokens.tokens, tokens.data.len()), (from, count, 40 * count));
        assert!(tokens.data.iter().enumerate().all(|(k, &x)| x == float(k, array, layer)));
    }
    assert_eq!(second.packed_keys, None);
}

#[test]
fn golden_file_is_rewritten_byte_for_byte() {
    let mut written = Vec::new();
    assert_eq!(golden().write_to(&mut written).unwrap(), GOLDEN.len() as u64);
    assert!(written == GOLDEN);
    let again = Snapshot::new(golden().header().clone(), golden().layers().to_vec()).unwrap();
    assert!(again == golden());
}

/// A generator of Knuth's, for places in a file.
struct Places(u64);

impl Places {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[test]
fn every_changed_byte_is_told() {
    let mut places = Places(1);
    let flip = |at: usize, bit: usize| {
        let mut bytes = GOLDEN.to_vec();
        bytes[at] ^= 1 << bit;
        read(&bytes).expect_err(&format!("byte {at}, bit {bit}"))
    };
    for at in 0..TOKEN_IDS {
        for bit in 0..8 {
            let error = flip(at, bit);
            let right = match at {
                0..8 => matches!(error, SnapshotError::NotASnapshot { .. }),
                8..12 => matches!(error, SnapshotError::UnknownVersion { known: 1, .. }),
                // Another length looks like a file that ends too early, or like another header.
                12..16 => {
                    matches!(error, SnapshotError::Truncated { .. } | SnapshotError::Damaged { .. })
                }
                _ => {
                    let message = error.to_string();
                    matches!(error, SnapshotError::Damaged { .. }) && message.contains("header")
                }
            };
            assert!(right, "byte {at}, bit {bit}: {error}");
        }
    }
    for _ in 0..500 {
        let at = TOKEN_IDS + places.below(GOLDEN.len() - TOKEN_IDS);
        let error = flip(at, places.below(8));
        // A mask or padding bit is found with the checksum, too: it comes first.
        assert!(matches!(error, SnapshotError::Damaged { .. }), "byte {at}: {error}");
    }
}

#[test]
fn every_shorter_file_is_told() {
    let none = read(&[]).unwrap_err();
    assert_eq!(none.to_string(), "not a snapshot: there are no bytes");
    let mut places = Places(2);
    let random = (0..500).map(|_| LAYERS + places.below(GOLDEN.len() - LAYERS));
    for length in (1..=LAYERS).chain(GOLDEN.len() - 40..GOLDEN.len()).chain(random) {
        let error = read(&GOLDEN[..length]).unwrap_err();
        assert!(matches!(error, SnapshotError::Truncated { .. }), "{length} bytes: {error}");
    }
    let error = read(&GOLDEN[..TOKEN_IDS + 5]).unwrap_err().to_string();
    assert_eq!(error, "truncated snapshot: 5 of 304 bytes of the token ids");
    let longer = [GOLDEN, &[0]].concat();
    assert!(matches!(read(&longer), Err(SnapshotError::Damaged { .. })));
    let other = read(b"GGUF\x03\0\0\0").unwrap_err();
    assert!(matches!(other, SnapshotError::NotASnapshot { .. }), "{other}");
}

/// The golden file with other bytes at `at`, and checksums that agree.
fn forged(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = GOLDEN.to_vec();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    reseal(&mut file);
    file
}

fn reseal(file: &mut [u8]) {
    for at in [PREAMBLE + HEADER, file.len() - 32] {
        let digest = Sha256::digest(&file[..at]);
        file[at..at + 32].copy_from_slice(&digest);
    }
}

#[test]
fn rules_hold_under_right_checksums() {
    let header = |at: usize| PREAMBLE + at;
    let half = |bits: u16| bits.to_le_bytes();
    // After the sinks, keys at 2 bits: codes, scales and zeros.
    let mask = LAYERS + 2 * 2 * 3 * 20 * 2 + 4 * 160 + 2 * 2 * 160;
    let lower = mask + 4 * 8;
    let value_codes = lower + 4 * 2 * 4 * 5;
    for (what, at, bytes, part) in [
        ("tokens", header(32), &u64::MAX.to_le_bytes()[..], "a length of"),
        ("tokens", header(32), &0u64.to_le_bytes(), "0 tokens, not 1 to 4294967294"),
        ("tokens", header(32), &(u64::from(u32::MAX)).to_le_bytes(), "truncated"),
        ("packed keys", header(40), &66u64.to_le_bytes(), "boundaries 35 and 66"),
        ("packed values", header(48), &77u64.to_le_bytes(), "boundaries 4 and 77"),
        ("kept keys", header(56), &2u64.to_le_bytes(), "boundaries 2 and 67"),
        ("group size", header(72), &48u32.to_le_bytes(), "invalid group-size: 48"),
        ("page", header(88), &24u32.to_le_bytes(), "invalid page-tokens: 24"),
        ("value residual", header(96), &2u32.to_le_bytes(), "value residual 2"),
        ("bits", header(100), &[3, 0, 0, 0], "codes of 3 bits"),
        ("store type", header(101), &[3], "store type 3"),
        ("promoted values", header(104), &[2, 0, 1, 0], "only keys have promoted channels"),
        ("rotary style", header(108), &2u32.to_le_bytes(), "rotary style 2"),
        ("frequencies", header(116), &u32::MAX.to_le_bytes(), "4294967295 frequencies"),
        ("layers", header(120), &3u32.to_le_bytes(), "3 layers"),
        ("kv heads", header(156), &0u32.to_le_bytes(), "kv heads and head_dim"),
        ("head_dim", header(160), &10u32.to_le_bytes(), "16 rotated channels of 10"),
        ("window", header(192), &32u64.to_le_bytes(), "within the residual has codes"),
        ("key bias", header(180), &7u32.to_le_bytes(), "key bias 7"),
        ("promoted", header(174), &10_001u16.to_le_bytes(), "invalid key-promote"),
        ("mask", mask, &[0b1111], "does not have 5 bits"),
        ("padding", value_codes + 8, &[0, 0, 1, 0], "values of 20 channels have more codes"),
        ("signaling", LAYERS, &half(0x7d00), "layer 0: keys of the sinks hold a signaling NaN"),
        ("signaling", LAYERS + 240, &half(0xff81), "layer 0: values of the sinks hold"),
    ] {
        let error = read(&forged(at, bytes)).expect_err(what);
        let truncated = part == "truncated" && matches!(error, SnapshotError::Truncated { .. });
        let invalid = matches!(error, SnapshotError::Invalid { .. });
        let named = error.to_string().contains(part);
        assert!(truncated || invalid && named, "{what}: {error}");
    }
    // A NaN that is quiet is kept as it is.
    let nan = forged(LAYERS, &half(0x7e01));
    let mut written = Vec::new();
    read(&nan).unwrap().write_to(&mut written).unwrap();
    assert!(written == nan);
    // A length that fits nothing is refused before it is read.
    let error = read(&forged(12, &u32::MAX.to_le_bytes())).unwrap_err();
    assert!(matches!(error, SnapshotError::Damaged { .. }), "{error}");
}

#[test]
fn contents_that_do_not_fit_are_refused() {
    let (header, layers) = (golden().header().clone(), golden().layers().to_vec());
    let message = |change: fn(&mut Vec<CanonicalLayer>)| {
        let mut layers = layers.clone();
        change(&mut layers);
        Snapshot::new(header.clone(), layers).unwrap_err().to_string()
    };
    assert_eq!(
        message(|layers| layers[0].full.values.data[5] = 1.0 + 2f32.powi(-9)),
        "snapshot: layer 0 has 1.0019531e0 among the full-precision values, which is no bf16"
    );
    assert!(message(|layers| layers[0].sinks.keys.data[0] = 1e9).contains("which is no f16"));
    assert!(message(|layers| layers.truncate(1)).contains("layers has 1 elements, expected 2"));
    assert!(message(|layers| layers[0].packed_keys = None).contains("quantized keys"));
    assert!(message(|layers| layers[1].full.keys.tokens = 72).contains("do not fit the layer"));
    let f32 = |layers: &mut Vec<CanonicalLayer>| layers[1].full.keys.data[0] = 1.0 + f32::EPSILON;
    let mut exact = layers.clone();
    f32(&mut exact);
    assert!(Snapshot::new(header, exact).is_ok());
}

#[test]
fn another_model_or_cache_is_told() {
    let snapshot = golden();
    let model = &snapshot.header().model;
    let check = |model: &ModelIdentity, builder: CacheConfigBuilder, layers: Vec<LayerSpec>| {
        let config = builder.build().unwrap();
        let policy = KiviPolicy::new(&config);
        let pool = PoolSpec::for_context(config, layers, 4, 1000).unwrap();
        match snapshot.check(model, &pool, &policy) {
            Ok(()) => String::new(),
            Err(Error::Snapshot(
                error @ (SnapshotError::OtherModel { .. } | SnapshotError::OtherCache { .. }),
            )) => error.to_string(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(check(model, config(), layers()), "");
    // Of no influence on the contents, or of none that cannot be undone.
    assert_eq!(check(model, config().page_tokens(32), layers()), "");
    assert_eq!(check(model, config().rollback_length(39), layers()), "");
    assert_eq!(check(model, config().rollback_length(0), layers()), "");
    assert_eq!(check(model, config().key(Format::F32), layers()), "", "only a default");

    let cache = |builder| check(model, builder, layers());
    assert_eq!(
        cache(config().rollback_length(41)),
        "snapshot of another cache: a rollback length of only 40 instead of 41"
    );
    assert_eq!(
        cache(config().group_size(32).page_tokens(32)),
        "snapshot of another cache: a group size of 16 instead of 32"
    );
    assert!(
        cache(config().residual_length(16).page_tokens(16)).contains("a residual length of 32")
    );
    assert!(cache(config().sink_length(4)).contains("a sink length of 3 instead of 4"));
    assert!(
        cache(config().value_residual(ValueResidual::Block)).contains("Window instead of Block")
    );
    assert!(cache(config().segment_tokens(None)).contains("segments of 64 tokens"));
    let mut other = layers();
    other.pop();
    assert!(check(model, config(), other).contains("layers: 2 instead of 1"));
    let mut other = layers();
    other[1].format.values = Format::KIVI4;
    assert_eq!(
        check(model, config(), other),
        "snapshot of another cache: layer 1: 2 kv heads of 20 in a window of 50, keys f32, values \
         kivi8 instead of 2 kv heads of 20 in a window of 50, keys f32, values kivi4"
    );

    let mut other = model.clone();
    other.fingerprint[31] = 0;
    assert!(check(&other, config(), layers()).contains("of another model: fingerprint"));
    let mut other = model.clone();
    other.rope.frequencies[7] *= 2.0;
    assert!(check(&other, config(), layers()).contains("rotary embedding Interleaved over 16"));
    let mut other = model.clone();
    other.key_bias_beside[0] = false;
    assert_eq!(
        check(&other, config(), layers()),
        "snapshot of another model: key biases beside the cache in 1 of 2 layers instead \
         of in 0 of 2 layers"
    );
}

#[test]
fn files_are_replaced_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("conversation.kivi");
    std::fs::write(&path, "something else").unwrap();
    assert_eq!(golden().save(&path).unwrap(), GOLDEN.len() as u64);
    assert!(std::fs::read(&path).unwrap() == GOLDEN);
    assert!(Snapshot::load(&path).unwrap() == golden());
    let names: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["conversation.kivi"], "nothing else is left");

    // A folder that is not there, and a path that is a folder.
    for path in [folder.path().join("none/x.kivi"), folder.path().to_owned()] {
        let error = golden().save(&path).unwrap_err();
        let Error::Snapshot(error) = error else { panic!("{error}") };
        assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
        let root = error.root();
        assert!(matches!(root, SnapshotError::Io { operation: "write", .. }), "{root}");
    }
    let Err(Error::Snapshot(error)) = Snapshot::load(folder.path().join("none")) else { panic!() };
    assert!(matches!(error.root(), SnapshotError::Io { operation: "read", .. }));
    std::fs::write(&path, &GOLDEN[..100]).unwrap();
    let Err(Error::Snapshot(error)) = Snapshot::load(&path) else { panic!() };
    assert!(error.to_string().contains("conversation.kivi: truncated snapshot"), "{error}");
}

#[cfg(unix)]
#[test]
fn links_stay_and_point_to_the_new_file() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    golden().save(&link).unwrap();
    assert!(link.is_symlink() && std::fs::read(&file).unwrap() == GOLDEN);
}

#[test]
fn failures_of_the_output_are_told() {
    /// Room for so many bytes.
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = bytes.len().min(self.0);
            self.0 -= written;
            Ok(written)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for room in [0, 20, 300, 5000, GOLDEN.len() - 1] {
        let error = golden().write_to(Full(room)).unwrap_err();
        assert!(matches!(error, Error::Snapshot(SnapshotError::Io { .. })), "{error}");
    }
    assert!(golden().write_to(Full(GOLDEN.len())).is_ok());
}
