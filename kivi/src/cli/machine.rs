//! The machine a result was measured on.

use serde_json::{Value, json};

/// Processor, cores, operating system.
pub(super) fn describe() -> Value {
    json!({
        "processor": processor().unwrap_or_else(|| std::env::consts::ARCH.into()),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
    })
}

/// The processor's own name, where Linux says it.
fn processor() -> Option<String> {
    field("/proc/cpuinfo", "model name")
}

/// Resident memory of this process and its maximum so far, in bytes, where Linux says it.
pub(super) fn resident_bytes() -> Option<(u64, u64)> {
    let kib =
        |name| field("/proc/self/status", name)?.strip_suffix(" kB")?.trim().parse::<u64>().ok();
    Some((kib("VmRSS")? * 1024, kib("VmHWM")? * 1024))
}

/// Makes the maximum of resident memory begin again at what is resident now, where Linux lets us
/// (`clear_refs` in proc_pid_clear_refs(5)), and says whether it did.
pub(super) fn reset_peak_resident() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The value of the first line `name: value` of a file.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}
