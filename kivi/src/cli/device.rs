//! Choosing a backend.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use kivi::{
    DecoderBackend, WeightFormat,
    models::{Checkpoint, Llama},
};

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

/// What is computed where, for the start-up line: backend, device, formats of the weights, key biases.
pub(super) fn describe<B: DecoderBackend>(llama: &Llama<B>, checkpoint: &Checkpoint) -> String {
    let backend = llama.backend();
    let capabilities = backend.capabilities();
    let stored = |format: &WeightFormat| {
        checkpoint.inventory().iter().any(|tensor| tensor.format == format.name())
    };
    let weights = WeightFormat::ALL.iter().filter(|format| stored(format)).map(|&format| {
        let kept = backend.kept_as(format);
        if kept == format { format.to_string() } else { format!("{format} as {kept}") }
    });
    let weights: Vec<_> = weights.collect();
    let (name, device) = (capabilities.name, capabilities.device);
    let biases = match llama.key_biases_beside() {
        0 => String::new(),
        layers => {
            let all = llama.config().layers;
            format!("; key biases of {layers} of {all} layers are kept beside the cache")
        }
    };
    format!("{name}: {device}; weights: {}{biases}", weights.join(", "))
}

/// Something to do on whichever backend is chosen.
pub(super) trait Task {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()>;
}

impl DeviceOptions {
    /// The instruction set of the chosen backend.
    pub(super) fn isa(&self) -> Result<&'static str> {
        match self.device {
            #[cfg(feature = "cpu")]
            DeviceName::Auto | DeviceName::Cpu => Ok(kivi::cpu::Isa::detect()?.name()),
            #[cfg(not(feature = "cpu"))]
            DeviceName::Auto | DeviceName::Cpu => missing("cpu").map(|()| ""),
            DeviceName::CpuRef => Ok("scalar"),
        }
    }

    /// Opens the chosen backend and runs `task` on it.
    pub(super) fn run(&self, task: impl Task) -> Result<()> {
        match self.device {
            #[cfg(feature = "cpu")]
            DeviceName::Auto | DeviceName::Cpu => {
                let cpu = kivi::cpu::Cpu::new(self.threads)?;
                use_threads(self.threads)?;
                task.run(cpu)
            }
            #[cfg(not(feature = "cpu"))]
            DeviceName::Auto | DeviceName::Cpu => missing("cpu"),
            #[cfg(feature = "cpu-ref")]
            DeviceName::CpuRef if self.threads > 1 => {
                bail!("the reference runs on one thread, not on {}", self.threads)
            }
            #[cfg(feature = "cpu-ref")]
            DeviceName::CpuRef => {
                use_threads(1)?;
                task.run(kivi::cpu_ref::CpuRef)
            }
            #[cfg(not(feature = "cpu-ref"))]
            DeviceName::CpuRef => missing("cpu-ref"),
        }
    }
}

/// What is computed beside the backend, such as scores, keeps to the same number of threads.
fn use_threads(threads: usize) -> Result<()> {
    Ok(rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?)
}

#[cfg(not(all(feature = "cpu", feature = "cpu-ref")))]
fn missing(feature: &str) -> Result<()> {
    bail!("this program was built without the backend {feature}")
}
