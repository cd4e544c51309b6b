//! What the machine is, as far as the numbers depend on it.

use serde_json::{Value, json};
use std::fs;

/// Instruction sets that matter to the kernels of either program, as Linux names them.
const INSTRUCTION_SETS: [&str; 15] = [
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "sve",
];
/// Assumed where the system does not say, in bytes.
const LAST_LEVEL_CACHE: u64 = 32 << 20;

/// The machine the numbers are from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) cores: usize,
    pub(super) instruction_sets: Vec<&'static str>,
    /// In bytes.
    pub(super) last_level_cache: u64,
}

impl Machine {
    pub(super) fn this() -> Self {
        let information = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let (processor, instruction_sets) = processor(&information);
        Self {
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            instruction_sets,
            last_level_cache: last_level_cache().unwrap_or(LAST_LEVEL_CACHE),
        }
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "processor": self.processor,
            "cores": self.cores,
            "instruction_sets": self.instruction_sets,
            "last_level_cache_bytes": self.last_level_cache,
            "os": std::env::consts::OS,
            "arch": std::env::consts::ARCH,
        })
    }
}

/// Name and instruction sets from Linux's description of the first processor.
fn processor(information: &str) -> (Option<String>, Vec<&'static str>) {
    let field = |name: &str| {
        let mut fields = information.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    // x86 calls them flags, Arm features.
    let flags = field("flags").or_else(|| field("Features")).unwrap_or_default();
    let has = |set: &&str| flags.split_whitespace().any(|flag| flag == *set);
    (field("model name").map(str::to_owned), INSTRUCTION_SETS.into_iter().filter(has).collect())
}

/// The largest cache that Linux lists for the first core.
fn last_level_cache() -> Option<u64> {
    let size = |index: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        bytes(fs::read_to_string(path).ok()?.trim())
    };
    (0..8).filter_map(size).max()
}

/// A size such as `32768K`.
fn bytes(text: &str) -> Option<u64> {
    let kib: u64 = text.strip_suffix('K')?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_linux_descriptions() {
        let x86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx avx2 avx512vl\n\
                   \nprocessor\t: 1\nmodel name\t: Other\nflags\t: fma\n";
        let found = processor(x86);
        assert_eq!(found, (Some("Some CPU @ 2 GHz".to_owned()), vec!["avx", "avx2", "avx512vl"]));
        let arm = "processor\t: 0\nFeatures\t: fp asimd asimddp\n";
        assert_eq!(processor(arm), (None, vec!["asimddp"]));
        assert_eq!(processor(""), (None, vec![]));
    }

    #[test]
    fn reads_cache_sizes() {
        assert_eq!(bytes("32768K"), Some(33_554_432));
        assert_eq!(bytes("512"), None);
        assert_eq!(bytes("K"), None);
    }
}
