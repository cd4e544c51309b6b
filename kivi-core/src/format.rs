//! How keys or values are stored.

mod promotion;

pub use promotion::Promotion;

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
/// Its name is that of [`Format::NAMED`], with the share of [promoted](Promotion) channels behind a
/// plus sign if there are any: `kivi2+0.25`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Format {
    /// Width of the codes, or `None` for the uncompressed baseline.
    pub bits: Option<Bits>,
    /// Type of what is not quantized: the residual, or everything.
    pub store: StoreDtype,
    /// Channels with 4 bits instead of 2; only for keys, and only with [`Bits::Two`], which is
    /// checked when a configuration or a pool is built.
    pub promoted: Option<Promotion>,
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
        Self { bits, store, promoted: None }
    }

    /// The uncompressed format of the same type.
    pub const fn full(self) -> Self {
        Self::new(None, self.store)
    }

    /// The same with the share `p` of every group's key channels at 4 bits.
    ///
    /// ```
    /// let format = kivi_core::Format::KIVI2.promote(0.25)?;
    /// assert_eq!(format.to_string(), "kivi2+0.25");
    /// assert_eq!(format, "kivi2+0.25".parse()?);
    /// # Ok::<(), kivi_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the codes do not have 2 bits, or as [`Promotion::share`].
    pub fn promote(self, p: f64) -> Result<Self> {
        self.with_promotion(Promotion::share(p)?)
    }

    /// The same with promoted key channels.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the codes do not have 2 bits.
    pub fn with_promotion(self, promotion: Promotion) -> Result<Self> {
        let format = Self { promoted: Some(promotion), ..self };
        format.check_keys()?;
        Ok(format)
    }

    /// Checks that this can be the format of keys.
    pub(crate) fn check_keys(self) -> Result<()> {
        match (self.bits, self.promoted) {
            (Some(Bits::Two), _) | (_, None) => Ok(()),
            _ => Err(Error::config("key-promote", self, "promoted channels take kivi2 keys")),
        }
    }

    /// Checks that this can be the format of values.
    pub(crate) fn check_values(self) -> Result<()> {
        match self.promoted {
            None => Ok(()),
            Some(_) => Err(Error::config(
                "cache-type-v",
                self,
                "only keys have promoted channels, values take the format without",
            )),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bits {
            None => f.write_str(self.store.name())?,
            Some(bits) => write!(f, "kivi{}", bits.get())?,
        }
        if let Some(promotion) = self.promoted {
            write!(f, "+{promotion}")?;
        }
        if self.bits.is_some() && self.store != StoreDtype::F16 {
            write!(f, " over {}", self.store.name())?;
        }
        Ok(())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let (base, promotion) = match name.split_once('+') {
            Some((base, share)) => (base, Some(share)),
            None => (name, None),
        };
        let Some((_, format)) = Self::NAMED.iter().find(|(known, _)| *known == base) else {
            let known: Vec<_> = Self::NAMED.iter().map(|(known, _)| *known).collect();
            let allowed = format!("one of {}, for keys also kivi2+SHARE", known.join(", "));
            return Err(Error::config("cache type", name, allowed));
        };
        match promotion {
            None => Ok(*format),
            Some(share) => format.with_promotion(share.parse()?),
        }
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

    #[test]
    fn promoted_formats_have_names() {
        for name in ["kivi2+0.25", "kivi2+0.125", "kivi2+0.1", "kivi2+1"] {
            let format: Format = name.parse().unwrap();
            assert_eq!(format.bits, Some(Bits::Two));
            assert_eq!(format.to_string(), name);
        }
        assert_eq!("kivi2+0.25".parse::<Format>().unwrap().promoted, Some(Promotion::QUARTER));
        assert_eq!("kivi2+.5".parse::<Format>().unwrap(), Format::KIVI2.promote(0.5).unwrap());
        let bf16 = Format::new(Some(Bits::Two), StoreDtype::Bf16).promote(0.25).unwrap();
        assert_eq!(bf16.to_string(), "kivi2+0.25 over bf16");
        assert_eq!(bf16.full(), Format::BF16);
        for name in ["kivi2+", "kivi2+0", "kivi2+1.5", "kivi2++0.25", "kivi2+-1", "kivi2+0.25+0.25"]
        {
            let message = name.parse::<Format>().unwrap_err().to_string();
            assert!(message.contains("share above 0"), "{message}");
        }
        for name in ["kivi4+0.25", "f16+0.25"] {
            let message = name.parse::<Format>().unwrap_err().to_string();
            assert_eq!(
                message,
                format!("invalid key-promote: {name} (promoted channels take kivi2 keys)")
            );
        }
        assert!("q4_0+0.25".parse::<Format>().unwrap_err().to_string().contains("q4_0+0.25"));
    }
}
