//! Choosing a backend.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use kivi::DecoderBackend;

/// No machine has more cores by far; so many threads are a slip of the finger.
const MAX_THREADS: usize = 4096;

/// Options that choose a backend.
#[derive(Args, Clone, Debug)]
pub(super) struct DeviceOptions {
    /// Where to compute.
    #[arg(long, env = "KIVI_DEVICE", value_enum, default_value = "auto")]
    device: DeviceName,
    /// Threads of the CPU backend; 0 is one per core.
    #[arg(long, env = "KIVI_THREADS", default_value_t = 0)]
    threads: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DeviceName {
    /// The best backend of this build: the CPU.
    Auto,
    /// The fast CPU backend.
    Cpu,
    /// The scalar reference: slow, and the definition of what is right.
    CpuRef,
}

/// Something to do on whichever backend is chosen.
pub(super) trait Task {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()>;
}

impl DeviceOptions {
    /// Opens the chosen backend and runs `task` on it.
    pub(super) fn run(&self, task: impl Task) -> Result<()> {
        if self.threads > MAX_THREADS {
            bail!("--threads {} is too many: at most {MAX_THREADS}", self.threads);
        }
        match self.device {
            #[cfg(feature = "cpu")]
            DeviceName::Auto | DeviceName::Cpu => task.run(kivi::cpu::Cpu::new(self.threads)?),
            #[cfg(not(feature = "cpu"))]
            DeviceName::Auto | DeviceName::Cpu => missing("cpu"),
            #[cfg(feature = "cpu-ref")]
            DeviceName::CpuRef => task.run(kivi::cpu_ref::CpuRef),
            #[cfg(not(feature = "cpu-ref"))]
            DeviceName::CpuRef => missing("cpu-ref"),
        }
    }
}

#[cfg(not(all(feature = "cpu", feature = "cpu-ref")))]
fn missing(feature: &str) -> Result<()> {
    bail!("this program was built without the backend {feature}")
}
