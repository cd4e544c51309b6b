//! Options of the benchmarks, and how they are written.

use anyhow::Result;
use clap::Args;
use kivi::{CacheConfig, Format, KeyValue};
use std::{fmt, path::PathBuf, str::FromStr};

/// Formats of keys and values: `kivi2`, or `kivi4:kivi2` where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats(pub(super) KeyValue<Format>);

impl Formats {
    pub(super) const F16: Self = Self::both(Format::F16);

    pub(super) const fn both(format: Format) -> Self {
        Self(KeyValue::new(format, format))
    }
}

impl FromStr for Formats {
    type Err = kivi::Error;

    fn from_str(text: &str) -> kivi::Result<Self> {
        let (keys, values) = text.split_once(':').unwrap_or((text, text));
        Ok(Self(KeyValue::new(keys.parse()?, values.parse()?)))
    }
}

impl fmt::Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyValue { keys, values } = self.0;
        // Padded as a whole.
        if keys == values { f.pad(&keys.to_string()) } else { f.pad(&format!("{keys}:{values}")) }
    }
}

/// Query heads and the kv heads they share, written `32/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) query: usize,
    pub(super) kv: usize,
}

impl Heads {
    const MAX: usize = 4096;
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').and_then(|(query, kv)| {
            Some(Self { query: query.parse().ok()?, kv: kv.parse().ok()? })
        });
        let heads = parts.ok_or("not query heads / kv heads, such as 32/8")?;
        let Self { query, kv } = heads;
        if !(1..=Self::MAX).contains(&query) || !(1..=Self::MAX).contains(&kv) {
            return Err(format!("heads are 1 to {}", Self::MAX));
        }
        if !query.is_multiple_of(kv) {
            return Err(format!("{query} query heads are not a multiple of {kv} kv heads"));
        }
        Ok(heads)
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/{}", self.query, self.kv))
    }
}

/// A whole number within bounds, for `value_parser`.
pub(super) fn count<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (MIN..=MAX).contains(&n) => Ok(n),
        _ => Err(format!("not a whole number from {MIN} to {MAX}")),
    }
}

/// A positive number of seconds.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(s) if s > 0.0 && s <= 3600.0 => Ok(s),
        _ => Err("not a number of seconds above 0 and up to 3600".into()),
    }
}

/// A number of bytes, with a unit or without: `4GiB`, `512MiB`, `65536`.
pub(super) fn byte_size(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start() {
        "" | "B" => Some(0),
        "KiB" | "K" => Some(10),
        "MiB" | "M" => Some(20),
        "GiB" | "G" => Some(30),
        "TiB" | "T" => Some(40),
        _ => None,
    };
    let size = shift.and_then(|shift| number.parse::<usize>().ok()?.checked_mul(1 << shift));
    size.ok_or_else(|| "not a number of bytes, such as 4GiB or 512MiB".into())
}

/// Where the JSON object goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JsonTarget {
    Nowhere,
    /// Instead of the table.
    Stdout,
    /// Beside the table.
    File(PathBuf),
}

impl FromStr for JsonTarget {
    type Err = std::convert::Infallible;

    /// The environment variable serves the other commands too, whose `--json` is yes or no.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.to_ascii_lowercase().as_str() {
            "" | "0" | "n" | "no" | "f" | "false" | "off" => Self::Nowhere,
            "-" | "1" | "y" | "yes" | "t" | "true" | "on" => Self::Stdout,
            _ => Self::File(text.into()),
        })
    }
}

/// Options that the benchmarks of one step have.
#[derive(Args, Clone, Debug)]
pub(super) struct CommonOptions {
    /// Elements that share a scale and a zero: 16, 32, 64 or 128.
    #[arg(long, env = "KIVI_GROUP_SIZE", default_value_t = 32, value_name = "G")]
    group_size: usize,
    /// Newest tokens in full precision, a multiple of the group size.
    #[arg(
        long,
        visible_alias = "residual",
        env = "KIVI_RESIDUAL_LENGTH",
        default_value_t = 128,
        value_name = "R"
    )]
    residual_length: usize,
    /// First tokens in full precision.
    #[arg(
        long,
        visible_alias = "sinks",
        env = "KIVI_SINK_LENGTH",
        default_value_t = 0,
        value_name = "S"
    )]
    sink_length: usize,
    #[command(flatten)]
    pub(super) report: ReportOptions,
}

/// Options that say where the results go.
#[derive(Args, Clone, Debug)]
pub(super) struct ReportOptions {
    /// Write one JSON object to FILE, or to standard output instead of the table (-).
    #[arg(long, env = "KIVI_JSON", default_value = "no", hide_default_value = true, num_args = 0..=1, default_missing_value = "-", value_name = "FILE")]
    pub(super) json: JsonTarget,
}

impl ReportOptions {
    /// Whether standard output is for the JSON object alone.
    pub(super) fn quiet(&self) -> bool {
        self.json == JsonTarget::Stdout
    }
}

impl CommonOptions {
    /// The configuration with some formats.
    pub(super) fn config(&self, formats: Formats) -> Result<CacheConfig> {
        let builder = CacheConfig::builder()
            .key(formats.0.keys)
            .value(formats.0.values)
            .group_size(self.group_size)
            .residual_length(self.residual_length)
            .sink_length(self.sink_length);
        Ok(builder.build()?)
    }

    /// Whether standard output is for the JSON object alone.
    pub(super) fn quiet(&self) -> bool {
        self.report.quiet()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_one_name_or_two() {
        let pair: Formats = "kivi4:kivi2".parse().unwrap();
        assert_eq!(pair, Formats(KeyValue::new(Format::KIVI4, Format::KIVI2)));
        for text in ["kivi4:kivi2", "f16", "kivi8"] {
            assert_eq!(text.parse::<Formats>().unwrap().to_string(), text);
        }
        assert_eq!("kivi2:kivi2".parse::<Formats>().unwrap().to_string(), "kivi2");
        assert!("kivi3".parse::<Formats>().is_err() && "kivi2:".parse::<Formats>().is_err());
    }

    #[test]
    fn heads_share_evenly() {
        assert_eq!("71/1".parse(), Ok(Heads { query: 71, kv: 1 }));
        let message = "7/2".parse::<Heads>().unwrap_err();
        assert!(message.contains("7 query heads") && message.contains("2 kv heads"), "{message}");
        for text in ["", "8", "8/0", "0/1", "8/8/8", "-8/8", "9999/1"] {
            assert!(text.parse::<Heads>().is_err(), "{text}");
        }
    }

    #[test]
    fn byte_sizes() {
        assert_eq!(byte_size("4GiB"), Ok(4 << 30));
        assert_eq!(byte_size("512 MiB"), Ok(512 << 20));
        assert_eq!(byte_size("65536"), Ok(65536));
        for text in ["", "GiB", "-1", "1.5GiB", "4GB", "99999999999TiB"] {
            assert!(byte_size(text).is_err(), "{text}");
        }
    }
}
