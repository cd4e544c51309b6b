//! Metadata values of a GGUF file.

use super::cursor::Cursor;
use crate::{Error, Result};
use bytes::Bytes;

/// Type of a metadata value; the numbers are those of the GGUF specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    fn from_code(code: u32, key: &str) -> Result<Self> {
        Ok(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => {
                return Err(Error::gguf(format!("{key} has the unknown value type {code}")));
            }
        })
    }

    /// Bytes of one value, or the fewest bytes of one if the length varies.
    fn least_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any of the integer types.
    Integer(i128),
    /// An f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    String(String),
    /// An array of anything but arrays.
    Array(Array),
}

impl Value {
    /// Reads the type and the value of `key` from `file`; arrays stay views into it.
    pub(super) fn read(file: &Bytes, cursor: &mut Cursor<'_>, key: &str) -> Result<Self> {
        let kind = ValueType::from_code(cursor.u32(key)?, key)?;
        if kind == ValueType::Array {
            Array::read(file, cursor, key).map(Self::Array)
        } else {
            Self::read_scalar(kind, cursor, key)
        }
    }

    fn read_scalar(kind: ValueType, cursor: &mut Cursor<'_>, key: &str) -> Result<Self> {
        Ok(match kind {
            ValueType::U8 => Self::Integer(u8::from_le_bytes(cursor.array(key)?).into()),
            ValueType::I8 => Self::Integer(i8::from_le_bytes(cursor.array(key)?).into()),
            ValueType::U16 => Self::Integer(u16::from_le_bytes(cursor.array(key)?).into()),
            ValueType::I16 => Self::Integer(i16::from_le_bytes(cursor.array(key)?).into()),
            ValueType::U32 => Self::Integer(cursor.u32(key)?.into()),
            ValueType::I32 => Self::Integer(i32::from_le_bytes(cursor.array(key)?).into()),
            ValueType::U64 => Self::Integer(cursor.u64(key)?.into()),
            ValueType::I64 => Self::Integer(i64::from_le_bytes(cursor.array(key)?).into()),
            ValueType::F32 => Self::Float(f32::from_le_bytes(cursor.array(key)?).into()),
            ValueType::F64 => Self::Float(f64::from_le_bytes(cursor.array(key)?)),
            ValueType::Bool => match cursor.array(key)? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => {
                    return Err(Error::gguf(format!("{key} is the boolean {other}, not 0 or 1")));
                }
            },
            ValueType::String => Self::String(cursor.string(key)?.to_owned()),
            ValueType::Array => {
                return Err(Error::gguf(format!("{key} is an array of arrays")));
            }
        })
    }
}

/// An array of a GGUF file: a view into the file, checked when it was read.
#[derive(Clone, PartialEq)]
pub struct Array {
    kind: ValueType,
    length: usize,
    bytes: Bytes,
}

/// Type and length: vocabularies are long.
impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{:?}; {}]", self.kind, self.length)
    }
}

impl Array {
    fn read(file: &Bytes, cursor: &mut Cursor<'_>, key: &str) -> Result<Self> {
        let kind = ValueType::from_code(cursor.u32(key)?, key)?;
        if kind == ValueType::Array {
            return Err(Error::gguf(format!("{key} is an array of arrays")));
        }
        let least = kind.least_bytes();
        let length = cursor.count(least, &format!("length of {key}"))?;
        let start = cursor.position();
        match kind {
            ValueType::String => {
                for _ in 0..length {
                    cursor.string(key)?;
                }
            }
            ValueType::Bool => {
                for _ in 0..length {
                    Value::read_scalar(kind, cursor, key)?;
                }
            }
            // `count` made sure that the product is at most the length of the file.
            _ => {
                cursor.take(length * least, key)?;
            }
        }
        let bytes = file.slice(start..cursor.position());
        // At most the length of the file, which is in memory.
        Ok(Self { kind, length: length as usize, bytes })
    }

    /// Type of the elements.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value> + '_ {
        let mut cursor = Cursor::new(&self.bytes);
        // Never ends early: the same bytes were read once already.
        (0..self.length).map_while(move |_| Value::read_scalar(self.kind, &mut cursor, "").ok())
    }

    /// The elements of an array of strings, `None` for any other array.
    pub fn strings(&self) -> Option<impl Iterator<Item = &str>> {
        if self.kind != ValueType::String {
            return None;
        }
        let mut cursor = Cursor::new(&self.bytes);
        Some((0..self.length).map_while(move |_| cursor.string("").ok()))
    }
}
