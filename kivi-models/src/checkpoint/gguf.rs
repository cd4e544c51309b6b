//! A zero-copy reader for GGUF files, versions 2 and 3, little-endian.
//!
//! It is our own because the crates at hand trust the file: `ggus` 0.5 reserves room for whatever
//! counts the header claims, multiplies dimensions unchecked, turns any number into its type
//! enumeration and reads version 3 only; the reader in candle allocates whatever length a string
//! claims. Here every read is checked against the end of the file, and memory grows with the bytes
//! actually present. The format is specified in `docs/gguf.md` of the ggml repository.

use super::cursor::Cursor;
use super::tensor_type::TensorType;
use super::value::{Array, Value};
use crate::error::quoted;
use crate::{Error, Result};
use bytes::Bytes;
use std::collections::{BTreeMap, HashMap};

/// The first four bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
/// Most dimensions a tensor has (`GGML_MAX_DIMS`).
const MAX_DIMENSIONS: u32 = 4;
/// Longest key the specification allows; tensor names are far shorter.
const MAX_NAME_BYTES: usize = u16::MAX as usize;
/// Alignment of the tensor data when `general.alignment` does not say otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: a huge page.
const MAX_ALIGNMENT: u64 = 2 << 20;

/// A tensor of a GGUF file.
#[derive(Clone, PartialEq)]
pub struct GgufTensor {
    /// Name, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Dimensions, slowest first (the file has them fastest first); 1 to 4, none is 0.
    pub shape: Vec<usize>,
    /// Element type.
    pub kind: TensorType,
    /// The tensor's bytes, a view into the file.
    pub bytes: Bytes,
}

/// Everything but the bytes.
impl std::fmt::Debug for GgufTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufTensor")
            .field("name", &self.name)
            .field("shape", &self.shape)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// A parsed GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<GgufTensor>,
    index: HashMap<String, usize>,
}

impl Gguf {
    /// Parses the whole header of a file; the tensors stay views into `file`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when the bytes are damaged or cut off, [`Error::UnsupportedFeature`]
    /// for another version, big-endian files and tensor types that are not known by size.
    pub fn parse(file: Bytes) -> Result<Self> {
        let mut cursor = Cursor::new(&file);
        if cursor.array::<4>("magic")? != *MAGIC {
            return Err(Error::gguf("the file does not start with \"GGUF\""));
        }
        let version = cursor.u32("version")?;
        match version {
            2 | 3 => {}
            _ if (1..=3).contains(&version.swap_bytes()) => {
                return Err(Error::unsupported("a big-endian GGUF file", "little-endian"));
            }
            _ => {
                return Err(Error::unsupported(format!("GGUF version {version}"), "2, 3"));
            }
        }
        // A tensor takes at least an empty name, one dimension, a type and an offset; a key at least
        // an empty name, a type and a byte.
        let tensor_count = cursor.count(8 + 4 + 8 + 4 + 8, "tensor count")?;
        let key_count = cursor.count(8 + 4 + 1, "key count")?;

        let mut metadata = BTreeMap::new();
        for _ in 0..key_count {
            let key = name(&mut cursor, "key")?;
            let value = Value::read(&file, &mut cursor, &quoted(key))?;
            if metadata.insert(key.to_owned(), value).is_some() {
                return Err(Error::gguf(format!("key {} appears twice", quoted(key))));
            }
        }
        let mut gguf = Self { version, metadata, tensors: Vec::new(), index: HashMap::new() };

        let alignment = gguf.alignment()?;
        let mut headers = Vec::new();
        for _ in 0..tensor_count {
            headers.push(TensorHeader::read(&mut cursor)?);
        }
        // Both terms are far below u64::MAX: one is a length in memory.
        let data_start = (cursor.position() as u64).next_multiple_of(alignment);
        for header in headers {
            let tensor = header.locate(&file, data_start, alignment)?;
            if gguf.index.insert(tensor.name.clone(), gguf.tensors.len()).is_some() {
                let name = quoted(&tensor.name);
                return Err(Error::gguf(format!("tensor {name} appears twice")));
            }
            gguf.tensors.push(tensor);
        }
        Ok(gguf)
    }

    fn alignment(&self) -> Result<u64> {
        let alignment = self.integer("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
            Ok(alignment)
        } else {
            Err(Error::gguf(format!(
                "general.alignment is {alignment}, not a power of two up to {MAX_ALIGNMENT}"
            )))
        }
    }

    /// Version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Every key and value, in the order of the keys.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.index.get(name).map(|&index| &self.tensors[index])
    }

    /// The integer under `key`, of whatever width the file stores it in.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when it is not an integer or does not fit in `T`.
    pub fn integer<T: TryFrom<i128>>(&self, key: &str) -> Result<Option<T>> {
        self.typed(key, "an integer in range", |value| match value {
            Value::Integer(integer) => T::try_from(*integer).ok(),
            _ => None,
        })
    }

    /// The floating-point number under `key`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when it is something else.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a floating-point number", |value| match value {
            Value::Float(float) => Some(*float),
            _ => None,
        })
    }

    /// The boolean under `key`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when it is something else.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |value| match value {
            Value::Bool(boolean) => Some(*boolean),
            _ => None,
        })
    }

    /// The string under `key`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |value| match value {
            Value::String(string) => Some(string.as_str()),
            _ => None,
        })
    }

    /// The array under `key`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] when it is something else.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.metadata
            .get(key)
            .map(|value| {
                convert(value).ok_or_else(|| Error::gguf(format!("{key} is not {expected}")))
            })
            .transpose()
    }
}

/// A tensor's entry in the header, not yet checked against the file.
struct TensorHeader<'a> {
    name: &'a str,
    /// Fastest first.
    dimensions: Vec<u64>,
    kind: TensorType,
    /// From the start of the tensor data.
    offset: u64,
}

impl<'a> TensorHeader<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let name = name(cursor, "tensor name")?;
        let count = cursor.u32("number of dimensions")?;
        if !(1..=MAX_DIMENSIONS).contains(&count) {
            return Err(Error::gguf(format!(
                "tensor {} has {count} dimensions, not 1 to {MAX_DIMENSIONS}",
                quoted(name)
            )));
        }
        let dimensions =
            (0..count).map(|_| cursor.u64("dimension")).collect::<Result<Vec<u64>>>()?;
        let kind = TensorType::from_code(cursor.u32("tensor type")?, &quoted(name))?;
        let offset = cursor.u64("tensor offset")?;
        Ok(Self { name, dimensions, kind, offset })
    }

    fn locate(self, file: &Bytes, data_start: u64, alignment: u64) -> Result<GgufTensor> {
        let Self { name, dimensions, kind, offset } = self;
        let fail = |what: String| Err(Error::gguf(format!("tensor {} {what}", quoted(name))));
        if !offset.is_multiple_of(alignment) {
            return fail(format!("starts at {offset}, not a multiple of {alignment}"));
        }
        let (block_elements, block_bytes) = kind.block();
        if !dimensions[0].is_multiple_of(block_elements) {
            return fail(format!(
                "has rows of {} elements, {} needs multiples of {block_elements}",
                dimensions[0],
                kind.name()
            ));
        }
        let bytes = dimensions[1..]
            .iter()
            .try_fold(dimensions[0] / block_elements, |product, &dimension| {
                product.checked_mul(dimension)
            })
            .and_then(|blocks| blocks.checked_mul(block_bytes));
        let range = bytes.filter(|&bytes| bytes > 0).and_then(|bytes| {
            let start = data_start.checked_add(offset)?;
            let end = start.checked_add(bytes)?;
            Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
        });
        let shape: Result<Vec<usize>, _> = dimensions.iter().rev().map(|&n| n.try_into()).collect();
        let (Some(range), Ok(shape)) = (range, shape) else {
            return fail(format!("has the impossible shape {dimensions:?}"));
        };
        if range.end > file.len() {
            return fail(format!("ends at byte {}, the file at byte {}", range.end, file.len()));
        }
        Ok(GgufTensor { name: name.to_owned(), shape, kind, bytes: file.slice(range) })
    }
}

/// A key or tensor name.
fn name<'a>(cursor: &mut Cursor<'a>, what: &str) -> Result<&'a str> {
    let name = cursor.string(what)?;
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::gguf(format!(
            "{what} of {} bytes (at most {MAX_NAME_BYTES})",
            name.len()
        )));
    }
    Ok(name)
}
