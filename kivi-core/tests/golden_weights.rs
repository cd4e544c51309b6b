//! Every weight format against the values of the Python package `gguf`, bit for bit, and against
//! arbitrary bytes. `tools/golden_weights.py` wrote the file.

use bytes::Bytes;
use kivi_core::{Error, WeightData, WeightFormat};
use proptest::prelude::*;
use safetensors::SafeTensors;

const GOLDEN: &[u8] = include_bytes!("golden/weights.safetensors");

#[test]
fn values_equal_those_of_the_gguf_package() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    for format in WeightFormat::ALL {
        let data = golden.tensor(&format!("{format}.bytes")).unwrap();
        let values = golden.tensor(&format!("{format}.values")).unwrap();
        let [rows, columns] = *values.shape() else { panic!("{format}: not a matrix") };
        let weight =
            WeightData::new(format, [rows, columns], Bytes::copy_from_slice(data.data())).unwrap();
        let mut out = vec![f32::NAN; columns];
        for (row, expected) in values.data().chunks_exact(4 * columns).enumerate() {
            weight.dequantize_row(row, &mut out).unwrap();
            for (column, (out, expected)) in out.iter().zip(expected.as_chunks().0).enumerate() {
                let expected = f32::from_le_bytes(*expected);
                assert_eq!(
                    out.to_bits(),
                    expected.to_bits(),
                    "{format} [{row}, {column}]: {out} instead of {expected}"
                );
            }
        }
    }
}

#[test]
fn wrong_rows_and_lengths_are_refused() {
    let weight = WeightData::new(WeightFormat::Q4_0, [2, 32], Bytes::from(vec![0; 36])).unwrap();
    let request = weight.dequantize_row(2, &mut [0.0; 32]);
    assert!(matches!(request, Err(Error::InvalidRequest { .. })), "{request:?}");
    let shape = weight.dequantize_row(0, &mut [0.0; 31]);
    assert!(matches!(shape, Err(Error::InvalidShape { found: 31, expected: 32, .. })), "{shape:?}");
    let empty = WeightData::new(WeightFormat::Q4_0, [0, 32], Bytes::new()).unwrap();
    assert!(empty.dequantize_row(0, &mut [0.0; 32]).is_err());
    let narrow = WeightData::new(WeightFormat::Q6K, [3, 0], Bytes::new()).unwrap();
    narrow.dequantize_row(2, &mut []).unwrap();
}

proptest! {
    #[test]
    fn any_bytes_dequantize(bytes in prop::collection::vec(any::<u8>(), 2 * 256 * 4)) {
        for format in WeightFormat::ALL {
            let shape = [2, 256];
            let bytes = Bytes::copy_from_slice(&bytes[..format.tensor_bytes(shape).unwrap()]);
            let weight = WeightData::new(format, shape, bytes).unwrap();
            weight.dequantize_row(1, &mut [0.0; 256]).unwrap();
        }
    }
}
