//! Promoted key channels: how many of a group.

use crate::{Error, Result};
use std::{fmt, str::FromStr};

/// The share `p` of the key channels of every group that is *promoted* from 2 to 4 bits: `⌈p·D⌉` of
/// `D` channels, those with the largest range in the group (see
/// [`quantizer`](crate::quantizer#promoted-channels)).
///
/// Kept as a decimal fraction of four places, so that it prints as it was written and counts
/// without rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Promotion {
    ten_thousandths: u16,
}

impl Promotion {
    /// A quarter of the channels.
    pub const QUARTER: Self = Self { ten_thousandths: 2500 };
    /// An eighth of the channels.
    pub const EIGHTH: Self = Self { ten_thousandths: 1250 };

    const ONE: u16 = 10_000;

    /// The share `p`, above 0 and at most 1, with at most four decimal places.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for any other number.
    pub fn share(p: f64) -> Result<Self> {
        let scaled = p * f64::from(Self::ONE);
        let whole = scaled.round();
        let legal = whole >= 1.0 && whole <= f64::from(Self::ONE) && (scaled - whole).abs() < 1e-6;
        if !legal {
            return Err(Error::config("key-promote", p, Self::ALLOWED));
        }
        Ok(Self { ten_thousandths: whole as u16 })
    }

    /// `p`, which has four decimal places, as a whole number of them.
    pub(crate) const fn ten_thousandths(self) -> u16 {
        self.ten_thousandths
    }

    /// The share of so many ten thousandths.
    pub(crate) fn of_ten_thousandths(count: u16) -> Result<Self> {
        Self::share(f64::from(count) / f64::from(Self::ONE))
    }

    const ALLOWED: &str = "a share above 0 and at most 1 with up to four decimal places";

    /// `p`.
    pub fn get(self) -> f64 {
        f64::from(self.ten_thousandths) / f64::from(Self::ONE)
    }

    /// `⌈p·D⌉`: promoted channels of a group of `head_dim` channels.
    pub const fn count(self, head_dim: usize) -> usize {
        (head_dim * self.ten_thousandths as usize).div_ceil(Self::ONE as usize)
    }

    /// `⌈D/32⌉`: 32-bit words of the mask of a group that says which channels are promoted, the
    /// lowest bit first.
    pub const fn mask_words(head_dim: usize) -> usize {
        head_dim.div_ceil(32)
    }
}

impl fmt::Display for Promotion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.get())
    }
}

impl FromStr for Promotion {
    type Err = Error;

    fn from_str(share: &str) -> Result<Self> {
        let digits = share.starts_with(|c: char| c.is_ascii_digit() || c == '.');
        let p = share.parse().ok().filter(|_| digits);
        Self::share(p.ok_or_else(|| Error::config("key-promote", share, Self::ALLOWED))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rounded_up() {
        let count = |p: f64, head_dim| Promotion::share(p).unwrap().count(head_dim);
        assert_eq!([64, 128, 72, 20].map(|d| count(0.25, d)), [16, 32, 18, 5]);
        assert_eq!([64, 128, 72, 20].map(|d| count(0.125, d)), [8, 16, 9, 3]);
        // A tenth of 80 is 8, although 0.1 · 80 in binary arithmetic is a little more.
        assert_eq!([80, 81].map(|d| count(0.1, d)), [8, 9]);
        assert_eq!((count(0.0001, 20), count(1.0, 20), count(1.0, 1)), (1, 20, 1));
        assert_eq!([1, 32, 33, 72].map(Promotion::mask_words), [1, 1, 2, 3]);
    }

    #[test]
    fn shares_round_trip_and_nothing_else_is_taken() {
        for text in ["0.25", "0.125", "0.0625", "0.1", "0.0001", "1"] {
            assert_eq!(text.parse::<Promotion>().unwrap().to_string(), text);
        }
        assert_eq!(".25".parse::<Promotion>().unwrap(), Promotion::QUARTER);
        assert_eq!(Promotion::share(0.125).unwrap(), Promotion::EIGHTH);
        for text in ["", "0", "-0.25", "+0.25", "1.0001", "0.00005", "0.03125", "nan", "inf", "x"] {
            let message = text.parse::<Promotion>().unwrap_err().to_string();
            assert!(message.starts_with("invalid key-promote: "), "{message}");
        }
    }
}
