//! Compute capabilities, and published figures of devices that have them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A compute capability that code is generated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Architecture {
    /// Ampere: A100. Ada (RTX 4090, 8.9) runs the same machine code.
    Sm80,
    /// Hopper: H100, H200.
    Sm90,
    /// Blackwell: RTX 5090, RTX PRO 6000.
    Sm120,
}

impl Architecture {
    /// All, oldest first.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm90, Self::Sm120];

    /// Ten times the compute capability.
    pub fn version(self) -> u16 {
        match self {
            Self::Sm80 => 80,
            Self::Sm90 => 90,
            Self::Sm120 => 120,
        }
    }

    /// The name CubeCL gives NVRTC: with the features of exactly this one from 9.0 on.
    pub(super) fn target(self) -> String {
        let suffix = if self.version() >= 90 { "a" } else { "" };
        format!("sm_{}{suffix}", self.version())
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.version())
    }
}

impl From<Architecture> for String {
    fn from(architecture: Architecture) -> Self {
        architecture.to_string()
    }
}

impl TryFrom<String> for Architecture {
    type Error = String;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse()
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|architecture| architecture.to_string() == name);
        found.ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(Self::to_string).collect();
            format!("unknown architecture {name:?}; known are {}", known.join(", "))
        })
    }
}

/// What bounds a kernel on one device: published figures only.
pub struct Device {
    /// The product's name.
    pub name: &'static str,
    /// Whose machine code it runs.
    pub architecture: Architecture,
    /// Streaming multiprocessors, of four schedulers each.
    pub multiprocessors: u32,
    /// Boost clock in GHz.
    pub clock: f64,
    /// Memory bandwidth in GB/s.
    pub bandwidth: f64,
    /// Multiply-adds that the matrix units of a multiprocessor do per clock, f16 with f32
    /// accumulation, dense.
    pub matrix_rate: f64,
    /// Limits of a multiprocessor.
    pub limits: Limits,
}

/// Limits of a multiprocessor: table "Technical Specifications per Compute Capability" of the
/// CUDA C++ programming guide.
pub struct Limits {
    /// Resident warps.
    pub warps: u32,
    /// Resident blocks.
    pub blocks: u32,
    /// Shared memory in bytes.
    pub shared_bytes: u32,
}

impl Limits {
    /// Warps of 32 threads that are resident at once.
    ///
    /// 65,536 registers per multiprocessor, given to warps in units of 256; a block takes 1 KiB of
    /// shared memory beside its own from 8.0 on.
    pub fn resident_warps(&self, registers: u32, shared_bytes: usize, threads: u32) -> u32 {
        let warps = threads.div_ceil(32).max(1);
        let per_warp = (registers.max(1) * 32).next_multiple_of(256);
        // A warp's registers come from the quarter of the file that belongs to its scheduler.
        let by_registers = 4 * (16_384 / per_warp) / warps;
        let shared = u32::try_from(shared_bytes).unwrap_or(u32::MAX).saturating_add(1024);
        let blocks =
            by_registers.min(self.shared_bytes / shared).min(self.blocks).min(self.warps / warps);
        blocks * warps
    }
}

/// The devices of the report.
///
/// Clocks follow from the published f32 peak (two operations per lane and clock), matrix rates from
/// the published dense f16 peak with f32 accumulation: A100 19.5 and 312 TFLOP/s (data sheet),
/// H100 SXM and H200 67 and 989 (data sheets), RTX 4090 82.6 and 165.2 (Ada white paper), RTX 5090
/// 104.8 and 209.5 (Blackwell white paper).
pub const DEVICES: [Device; 5] = [
    Device {
        name: "A100 80GB",
        architecture: Architecture::Sm80,
        multiprocessors: 108,
        clock: 1.41,
        bandwidth: 2039.0,
        matrix_rate: 1024.0,
        limits: Limits { warps: 64, blocks: 32, shared_bytes: 164 << 10 },
    },
    Device {
        name: "RTX 4090",
        architecture: Architecture::Sm80,
        multiprocessors: 128,
        clock: 2.52,
        bandwidth: 1008.0,
        matrix_rate: 256.0,
        limits: Limits { warps: 48, blocks: 24, shared_bytes: 100 << 10 },
    },
    Device {
        name: "H100 SXM",
        architecture: Architecture::Sm90,
        multiprocessors: 132,
        clock: 1.98,
        bandwidth: 3350.0,
        matrix_rate: 1892.0,
        limits: Limits { warps: 64, blocks: 32, shared_bytes: 228 << 10 },
    },
    Device {
        name: "H200",
        architecture: Architecture::Sm90,
        multiprocessors: 132,
        clock: 1.98,
        bandwidth: 4800.0,
        matrix_rate: 1892.0,
        limits: Limits { warps: 64, blocks: 32, shared_bytes: 228 << 10 },
    },
    Device {
        name: "RTX 5090",
        architecture: Architecture::Sm120,
        multiprocessors: 170,
        clock: 2.41,
        bandwidth: 1792.0,
        matrix_rate: 256.0,
        limits: Limits { warps: 48, blocks: 24, shared_bytes: 100 << 10 },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for architecture in Architecture::ALL {
            assert_eq!(architecture.to_string().parse(), Ok(architecture));
        }
        assert!("sm_70".parse::<Architecture>().is_err());
    }

    /// By hand from the occupancy rules of the CUDA programming guide.
    #[test]
    fn occupancy() {
        let hopper = &DEVICES[2].limits;
        // 32 registers: 1,024 per warp, 64 warps fit.
        assert_eq!(hopper.resident_warps(32, 0, 128), 64);
        // 96 registers: 3,072 per warp, 5 per scheduler, 20 in all: 5 blocks of 4 warps.
        assert_eq!(hopper.resident_warps(96, 0, 128), 20);
        // 100 KiB and 1 KiB beside it: two blocks.
        assert_eq!(hopper.resident_warps(32, 100 << 10, 128), 8);
        // More than there is.
        assert_eq!(hopper.resident_warps(32, 228 << 10, 128), 0);
    }
}
