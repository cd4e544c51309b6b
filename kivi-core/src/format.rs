//! How keys or values are stored.

use crate::{Error, Result};
use half::{bf16, f16};
use std::{fmt, str::FromStr};

/// Width of a code. The code of an element is the integer `0 ..= levels()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bits {
    /// 2 bits: codes 0 to 3.
    Two,
    /// 4 bits: codes 0 to 15.
    Four,
    /// 8 bits: codes 0 to 255.
    Eight,
}

impl Bits {
    /// Every width.
    pub const ALL: [Self; 3] = [Self::Two, Self::Four, Self::Eight];

    /// The number of bits.
    pub const fn get(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// `L = 2^bits − 1`, the largest code.
    pub const fn levels(self) -> u32 {
        (1 << self.get()) - 1
    }

    /// Codes in one 32-bit word.
    pub const fn codes_per_word(self) -> usize {
        32 / self.get()
    }
}

/// Floating-point type of everything that is not quantized: keys and values are rounded to it once,
/// when they are appended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreDtype {
    /// IEEE 754 half precision.
    #[default]
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 single precision.
    F32,
}

impl StoreDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Rounds to nearest, ties to even. A finite value beyond the range becomes the largest finite
    /// one of its sign (see [`StoreDtype::saturates`]); NaN and infinities stay what they are.
    pub fn round(self, x: f32) -> f32 {
        let rounded = match self {
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::Bf16 => bf16::from_f32(x).to_f32(),
            Self::F32 => return x,
        };
        if rounded.is_infinite() && x.is_finite() { self.max().copysign(x) } else { rounded }
    }

    /// Whether [`StoreDtype::round`] has to saturate `x`.
    pub fn saturates(self, x: f32) -> bool {
        let infinite = match self {
            Self::F16 => f16::from_f32(x).is_infinite(),
            Self::Bf16 => bf16::from_f32(x).is_infinite(),
            Self::F32 => return false,
        };
        infinite && x.is_finite()
    }

    /// The largest finite value.
    pub fn max(self) -> f32 {
        match self {
            Self::F16 => f16::MAX.to_f32(),
            Self::Bf16 => bf16::MAX.to_f32(),
            Self::F32 => f32::MAX,
        }
    }
}

/// Format of the keys or of the values of a layer.
///
/// Promoted key channels (a second 2-bit plane over some channels) will be a further field; hence
/// the constructor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Format {
    /// Width of the codes, or `None` for the uncompressed baseline.
    pub bits: Option<Bits>,
    /// Type of what is not quantized: the residual, or everything.
    pub store: StoreDtype,
}

impl Format {
    /// 2-bit codes over f16.
    pub const KIVI2: Self = Self::new(Some(Bits::Two), StoreDtype::F16);
    /// 4-bit codes over f16.
    pub const KIVI4: Self = Self::new(Some(Bits::Four), StoreDtype::F16);
    /// 8-bit codes over f16.
    pub const KIVI8: Self = Self::new(Some(Bits::Eight), StoreDtype::F16);
    /// Uncompressed f16.
    pub const F16: Self = Self::new(None, StoreDtype::F16);
    /// Uncompressed bf16.
    pub const BF16: Self = Self::new(None, StoreDtype::Bf16);
    /// Uncompressed f32.
    pub const F32: Self = Self::new(None, StoreDtype::F32);

    /// The formats that have a name on the command line.
    pub const NAMED: [(&'static str, Self); 6] = [
        ("kivi2", Self::KIVI2),
        ("kivi4", Self::KIVI4),
        ("kivi8", Self::KIVI8),
        ("f16", Self::F16),
        ("bf16", Self::BF16),
        ("f32", Self::F32),
    ];

    /// A format; `bits: None` keeps everything in `store`.
    pub const fn new(bits: Option<Bits>, store: StoreDtype) -> Self {
        Self { bits, store }
    }

    /// The uncompressed format of the same type.
    pub const fn full(self) -> Self {
        Self::new(None, self.store)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bits, self.store) {
            (None, store) => f.write_str(store.name()),
            (Some(bits), StoreDtype::F16) => write!(f, "kivi{}", bits.get()),
            (Some(bits), store) => write!(f, "kivi{} over {}", bits.get(), store.name()),
        }
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::NAMED.iter().find(|(known, _)| *known == name);
        found.map(|(_, format)| *format).ok_or_else(|| {
            let known: Vec<_> = Self::NAMED.iter().map(|(known, _)| *known).collect();
            Error::config("cache type", name, format!("one of {}", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_saturates_finite_values_only() {
        assert_eq!(StoreDtype::F16.round(65519.0), 65504.0);
        assert_eq!(StoreDtype::F16.round(65520.0), 65504.0);
        assert!(StoreDtype::F16.saturates(65520.0) && !StoreDtype::F16.saturates(65519.0));
        assert_eq!(StoreDtype::F16.round(-1e9), -65504.0);
        assert_eq!(StoreDtype::F16.round(f32::INFINITY), f32::INFINITY);
        assert!(StoreDtype::F16.round(f32::NAN).is_nan());
        assert!(!StoreDtype::F16.saturates(f32::INFINITY));
        assert_eq!(StoreDtype::Bf16.round(f32::MAX), bf16::MAX.to_f32());
        // 1 + 2⁻¹¹ lies halfway between two f16 values; the even one is 1.
        assert_eq!(StoreDtype::F16.round(1.0 + 2f32.powi(-11)), 1.0);
    }

    #[test]
    fn names_round_trip() {
        for (name, format) in Format::NAMED {
            assert_eq!(name.parse::<Format>().unwrap(), format);
            assert_eq!(format.to_string(), name);
        }
        let message = "q4_0".parse::<Format>().unwrap_err().to_string();
        assert!(message.contains("q4_0") && message.contains("kivi2"), "{message}");
    }
}
