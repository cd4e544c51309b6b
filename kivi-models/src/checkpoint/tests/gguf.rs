//! The GGUF reader: files as they should be, and files as they should not.

use super::writer::{self, F16, F32, IQ4_XS, Q4_K, Writer, array, boolean, string, text, texts};
use crate::Error;
use crate::checkpoint::{Gguf, TensorType, Value, ValueType};
use kivi_core::WeightFormat;
use proptest::prelude::*;

fn parse(writer: &Writer) -> crate::Result<Gguf> {
    Gguf::parse(writer.build().into())
}

/// Asserts that a file is refused with a one-line message that contains `message`.
fn refused(file: Vec<u8>, message: &str) {
    let error = Gguf::parse(file.into()).expect_err(message).to_string();
    assert!(error.contains(message), "{error:?} does not contain {message:?}");
    assert!(!error.contains('\n') && error.len() < 500, "{error:?}");
}

#[test]
fn every_value_type_round_trips() {
    let bytes = |value: [u8; 8], count: usize| value[..count].to_vec();
    let minus_two = (-2i64).to_le_bytes();
    let writer = Writer::new()
        .key("u8", (0, vec![200]))
        .key("i8", (1, bytes(minus_two, 1)))
        .key("u16", (2, 60_000u16.to_le_bytes().to_vec()))
        .key("i16", (3, bytes(minus_two, 2)))
        .key("u32", writer::u32(4_000_000_000))
        .key("i32", (5, bytes(minus_two, 4)))
        .key("f32", writer::f32(0.25))
        .key("bool", boolean(true))
        .key("string", text("grüße"))
        .key("array", texts(&["", "é", "x"]))
        .key("u64", (10, u64::MAX.to_le_bytes().to_vec()))
        .key("i64", (11, bytes(minus_two, 8)))
        .key("f64", (12, 1e300f64.to_le_bytes().to_vec()))
        .key("floats", array(6, 2, &[0, 0, 128, 62, 0, 0, 0, 192]));
    for version in [2, 3] {
        let gguf = parse(&Writer { version, ..writer.clone() }).unwrap();
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.integer::<u8>("u8").unwrap(), Some(200));
        assert_eq!(gguf.integer::<u64>("u64").unwrap(), Some(u64::MAX));
        assert_eq!(gguf.integer::<u32>("u32").unwrap(), Some(4_000_000_000));
        assert_eq!(gguf.integer::<u16>("u16").unwrap(), Some(60_000));
        for key in ["i8", "i16", "i32", "i64"] {
            assert_eq!(gguf.integer::<i64>(key).unwrap(), Some(-2), "{key}");
            assert!(gguf.integer::<u64>(key).is_err(), "{key}");
        }
        assert_eq!(gguf.float("f32").unwrap(), Some(0.25));
        assert_eq!(gguf.float("f64").unwrap(), Some(1e300));
        assert_eq!(gguf.boolean("bool").unwrap(), Some(true));
        assert_eq!(gguf.string("string").unwrap(), Some("grüße"));
        let strings = gguf.array("array").unwrap().unwrap();
        assert_eq!(strings.strings().unwrap().collect::<Vec<_>>(), ["", "é", "x"]);
        let floats = gguf.array("floats").unwrap().unwrap();
        assert_eq!((floats.kind(), floats.len()), (ValueType::F32, 2));
        // 0x3E80_0000 and 0xC000_0000.
        assert_eq!(floats.iter().collect::<Vec<_>>(), [Value::Float(0.25), Value::Float(-2.0)]);
        assert_eq!(gguf.string("absent").unwrap(), None);
        assert!(gguf.string("u8").is_err() && gguf.float("u8").is_err());
    }
}

#[test]
fn tensors_are_views_with_their_dimensions_reversed() {
    for (alignment, key) in [(32, None), (8, Some(8)), (128, Some(128))] {
        let mut writer = Writer::new()
            .tensor("a", F16, &[3, 2], 12)
            .tensor("b", Q4_K, &[256, 1, 2], 2 * 144)
            .tensor("c", IQ4_XS, &[256], 136);
        writer.alignment = alignment;
        if let Some(key) = key {
            writer = writer.key("general.alignment", writer::u32(key));
        }
        let gguf = parse(&writer).unwrap();
        let a = gguf.tensor("a").unwrap();
        assert_eq!(a.shape, [2, 3]);
        assert_eq!(a.kind, TensorType::Weight(WeightFormat::F16));
        assert_eq!(a.bytes[..], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        let b = gguf.tensor("b").unwrap();
        assert_eq!((b.shape.as_slice(), b.bytes.len()), (&[2, 1, 256][..], 288));
        assert_eq!(b.bytes[..3], [1, 2, 3]);
        assert_eq!(gguf.tensor("c").unwrap().kind.name(), "IQ4_XS");
        assert_eq!(gguf.tensors().len(), 3);
        assert!(gguf.tensor("d").is_none());
    }
}

#[test]
fn damaged_headers_are_refused() {
    refused(vec![], "magic needs 4 bytes at byte 0, 0 are left");
    refused(b"GGU".to_vec(), "magic needs 4 bytes");
    refused(b"GGML\x03\0\0\0".to_vec(), "does not start with \"GGUF\"");
    refused(b"GGUF\x03\0\0".to_vec(), "version needs 4 bytes at byte 4");
    refused(b"GGUF\x01\0\0\0".to_vec(), "GGUF version 1");
    refused(b"GGUF\x04\0\0\0".to_vec(), "GGUF version 4");
    refused(b"GGUF\0\0\0\x03".to_vec(), "big-endian");
    let counts = |tensors, keys| Writer { counts: Some([tensors, keys]), ..Writer::new() }.build();
    refused(counts(u64::MAX, 0), "tensor count is 18446744073709551615, the file has room for");
    refused(counts(0, u64::MAX), "key count is 18446744073709551615, the file has room for");
    refused(counts(0, 1 << 40), "key count is 1099511627776");
}

#[test]
fn damaged_metadata_is_refused() {
    let with = |value| Writer::new().key("k", value).build();
    let huge = u64::MAX.to_le_bytes();
    refused(with((8, huge.to_vec())), "\"k\" needs 18446744073709551615 bytes");
    refused(with((8, [&2u64.to_le_bytes()[..], &[0xC3, 0x28]].concat())), "is not UTF-8");
    refused(with((13, vec![0; 8])), "\"k\" has the unknown value type 13");
    refused(with((7, vec![2])), "\"k\" is the boolean 2, not 0 or 1");
    refused(with(array(9, 1, &[0; 32])), "\"k\" is an array of arrays");
    refused(with(array(99, 1, &[0; 32])), "unknown value type 99");
    refused(
        with(array(10, 1 << 61, &[])),
        "length of \"k\" is 2305843009213693952, the file has room",
    );
    refused(with(array(8, 1 << 60, &[])), "the file has room for");
    refused(with(array(8, 1, &huge)), "needs 18446744073709551615 bytes");
    refused(with(array(7, 2, &[1, 7])), "the boolean 7");
    let twice = Writer { keys: vec![("k".to_owned(), writer::u32(1)); 2], ..Writer::new() };
    refused(twice.build(), "key \"k\" appears twice");
    refused(Writer::new().key(&"k".repeat(70_000), writer::u32(1)).build(), "key of 70000 bytes");
    refused(
        Writer::new().key("a\nb", (99, vec![])).build(),
        "\"a\\nb\" has the unknown value type",
    );
    for bad in [0, 3, 1 << 30] {
        let file = Writer::new().key("general.alignment", writer::u32(bad)).build();
        refused(file, "not a power of two up to");
    }
    refused(Writer::new().key("general.alignment", text("32")).build(), "not an integer in range");
}

#[test]
fn damaged_tensors_are_refused() {
    let tensor = |kind, dimensions: &[u64]| Writer::new().tensor("t", kind, dimensions, 64).build();
    refused(tensor(F32, &[]), "tensor \"t\" has 0 dimensions, not 1 to 4");
    refused(tensor(F32, &[1; 5]), "tensor \"t\" has 5 dimensions");
    refused(tensor(F32, &[0]), "impossible shape [0]");
    refused(tensor(F32, &[4, 0, 4]), "impossible shape [4, 0, 4]");
    refused(tensor(F32, &[1 << 32, 1 << 32]), "impossible shape [4294967296, 4294967296]");
    refused(tensor(F32, &[u64::MAX]), "impossible shape");
    refused(tensor(F32, &[1 << 61]), "ends at byte");
    refused(tensor(F32, &[17]), "tensor \"t\" ends at byte 132, the file at byte 128");
    refused(tensor(Q4_K, &[128]), "has rows of 128 elements, Q4_K needs multiples of 256");
    refused(tensor(4, &[32]), "not supported: tensor \"t\" of ggml type 4");
    refused(tensor(u32::MAX, &[32]), "ggml type 4294967295");
    let at = |offset| {
        let mut writer = Writer::new().tensor("t", F32, &[16], 64);
        writer.tensors[0].offset = Some(offset);
        writer.build()
    };
    Gguf::parse(at(0).into()).unwrap();
    refused(at(16), "starts at 16, not a multiple of 32");
    refused(at(32), "ends at byte 160, the file at byte 128");
    refused(at(u64::MAX - 31), "impossible shape");
    let twice = Writer::new().tensor("t", F32, &[1], 4).tensor("t", F32, &[1], 4);
    refused(twice.build(), "tensor \"t\" appears twice");
    let long = Writer::new().tensor(&"t".repeat(70_000), F32, &[1], 4);
    refused(long.build(), "tensor name of 70000 bytes");
}

#[test]
fn every_truncation_is_refused() {
    let file = Writer::model().build();
    Gguf::parse(file.clone().into()).unwrap();
    for length in 0..file.len() {
        assert!(Gguf::parse(file[..length].to_vec().into()).is_err(), "{length} bytes");
    }
}

/// The names of the sizes a header can lie about, in the bytes before the tensor data.
fn header_bytes(file: &[u8]) -> usize {
    let needle = string("blk.1.ffn_norm.weight");
    file.windows(needle.len()).position(|window| window == needle).unwrap() + 64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Up to four damaged bytes and a cut: an answer, or an error; whatever is returned lies in the
    /// file.
    #[test]
    fn damaged_bytes_never_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in proptest::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut file = Writer::model().build();
        let header = header_bytes(&file);
        for (index, byte) in damage {
            file[index.index(header)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(header));
        }
        match Gguf::parse(file.into()) {
            Ok(gguf) => {
                for tensor in gguf.tensors() {
                    prop_assert!(!tensor.bytes.is_empty());
                }
                let _ = crate::ModelConfig::from_gguf(&gguf);
                let _ = crate::checkpoint::GgufVocabulary::from_gguf(&gguf);
            }
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }

    #[test]
    fn any_bytes_after_the_magic_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Gguf::parse([b"GGUF\x03\0\0\0", &bytes[..]].concat().into());
    }
}

#[test]
fn errors_name_their_kind() {
    let kind = |file: Vec<u8>| Gguf::parse(file.into()).unwrap_err();
    assert!(matches!(kind(b"GGUF\x09\0\0\0".to_vec()), Error::UnsupportedFeature { .. }));
    assert!(matches!(kind(b"GGUF\x03\0\0\0".to_vec()), Error::InvalidGguf { .. }));
}
