//! What was found, as data and as a page.

use super::devices::{DEVICES, Device};
use super::{Architecture, Assembled, CodegenError, Problem, Recorded, Toolchain, inspect, record};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// How long a load from memory takes, in nanoseconds: about what microbenchmarks of these devices
/// find. Only the column "in flight" depends on it.
const LATENCY: f64 = 600.0;
/// Multiply-adds of a product of the matrix units, `m16n8k16`.
const PRODUCT: f64 = 16.0 * 8.0 * 16.0;

/// All kernels of all problems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// In the order of the problems, each on every architecture.
    pub kernels: Vec<Kernel>,
}

/// One kernel on one architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Name of the problem.
    pub problem: String,
    /// The Rust function.
    pub function: String,
    /// What it is compiled for.
    pub architecture: Architecture,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of registers that spill; more than 0 fails the check.
    pub spill_bytes: u32,
    /// Local memory per thread in bytes.
    pub stack_bytes: u32,
    /// Shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Threads per block.
    pub threads: u32,
    /// Instructions outside the loops.
    pub outside: u32,
    /// Codes that a thread unpacks in a launch.
    pub codes_per_thread: u32,
    /// The loops that unpack codes; none in kernels that only support another.
    pub loops: Vec<Loop>,
}

/// A loop that unpacks codes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loop {
    /// What the codes are of.
    pub name: String,
    /// Instructions of a trip.
    pub instructions: u32,
    /// Codes that a thread unpacks in a trip.
    pub codes: u32,
    /// Bytes of codes, scales and zeros per code.
    pub bytes_per_code: f64,
    /// Products of the matrix units in a trip.
    pub matrix_products: u32,
    /// 128-bit loads from global memory in a trip.
    pub wide_loads: u32,
    /// Narrower loads.
    pub narrow_loads: u32,
    /// Instructions of a trip by opcode.
    pub opcodes: BTreeMap<String, u32>,
}

impl Loop {
    /// Instructions per code.
    pub fn per_code(&self) -> f64 {
        f64::from(self.instructions) / f64::from(self.codes)
    }

    /// Picoseconds per code that memory, the schedulers and the matrix units of a device need.
    fn times(&self, device: &Device) -> [f64; 3] {
        let clocks = device.clock * f64::from(device.multiprocessors) / 1000.0;
        let memory = self.bytes_per_code * 1000.0 / device.bandwidth;
        // Four schedulers, each an instruction of 32 threads per clock.
        let issue = self.per_code() / (4.0 * 32.0) / clocks;
        let products = f64::from(self.matrix_products) * PRODUCT;
        let matrix = products / (32.0 * f64::from(self.codes)) / device.matrix_rate / clocks;
        [memory, issue, matrix]
    }
}

impl Kernel {
    /// Instructions per code of the whole kernel: every loop's share, and what is outside.
    fn per_code(&self) -> f64 {
        let count = self.loops.len().max(1) as f64;
        let loops: f64 = self.loops.iter().map(Loop::per_code).sum();
        loops / count + f64::from(self.outside) / f64::from(self.codes_per_thread)
    }
}

impl Report {
    /// Compiles every problem for `architectures`; sources, PTX and machine code go to `folder`.
    ///
    /// # Errors
    ///
    /// What CubeCL or a tool says; a problem whose kernels have other loops than it says.
    pub fn make(
        problems: &[Problem],
        architectures: &[Architecture],
        tools: &Toolchain,
        folder: &Path,
    ) -> Result<Self, CodegenError> {
        std::fs::create_dir_all(folder)?;
        let mut kernels = Vec::new();
        for problem in problems {
            for &architecture in architectures {
                let recorded = record(architecture, &problem.launch).map_err(|message| {
                    CodegenError::Kernel { problem: problem.name.clone(), message }
                })?;
                let mut found = Vec::new();
                for (number, kernel) in recorded.iter().enumerate() {
                    let assembled = tools.assemble(&kernel.source, architecture)?;
                    keep(folder, problem, architecture, number, kernel, &assembled)?;
                    found.push(describe(problem, architecture, kernel, &assembled)?);
                }
                let loops: Vec<_> =
                    found.iter().flat_map(|kernel| &kernel.loops).map(|l| &l.name).collect();
                if loops != problem.loops {
                    return Err(CodegenError::Unexpected {
                        problem: format!("{} on {architecture}", problem.name),
                        expected: format!("loops {:?}", problem.loops),
                        found: format!("{loops:?}"),
                    });
                }
                kernels.append(&mut found);
            }
        }
        Ok(Self { kernels })
    }

    /// Why the report is not good enough, if it is not.
    pub fn complaints(&self) -> Vec<String> {
        let spills = |kernel: &&Kernel| kernel.spill_bytes > 0;
        let narrow = |kernel: &&Kernel| kernel.loops.iter().any(|l| l.narrow_loads > 0);
        let name = |kernel: &Kernel| format!("{} on {}", kernel.problem, kernel.architecture);
        let kernels = || self.kernels.iter();
        let spills = kernels()
            .filter(spills)
            .map(|kernel| format!("{} spills {} bytes", name(kernel), kernel.spill_bytes));
        let narrow = kernels()
            .filter(narrow)
            .map(|kernel| format!("{} has loads below 128 bits in a loop", name(kernel)));
        spills.chain(narrow).collect()
    }

    /// The page of the documentation.
    pub fn page(&self) -> String {
        let mut page = HEADER.to_owned();
        for architecture in Architecture::ALL {
            // Writing to a string does not fail; likewise below.
            let _ = writeln!(page, "\n## {architecture}\n");
            page += COUNT_COLUMNS;
            for kernel in self.kernels.iter().filter(|k| k.architecture == architecture) {
                if kernel.loops.is_empty() {
                    let _ = writeln!(
                        page,
                        "| {}: {} | – | – | – | – | – | {} | {} | {} | – |",
                        kernel.problem,
                        kernel.function,
                        kernel.registers,
                        kernel.spill_bytes,
                        kernel.shared_bytes,
                    );
                }
                for (i, l) in kernel.loops.iter().enumerate() {
                    let (name, whole) = match i {
                        0 => (kernel.problem.as_str(), format!("{:.2}", kernel.per_code())),
                        _ => ("", String::new()),
                    };
                    let _ = writeln!(
                        page,
                        "| {name} | {} | {} | {} | **{:.2}** | {} | {} | {} | {} | {whole} |",
                        l.name,
                        l.instructions,
                        l.codes,
                        l.per_code(),
                        l.wide_loads,
                        kernel.registers,
                        kernel.spill_bytes,
                        kernel.shared_bytes,
                    );
                }
            }
            for device in DEVICES.iter().filter(|d| d.architecture == architecture) {
                self.device(&mut page, device);
            }
        }
        page
    }

    fn device(&self, page: &mut String, device: &Device) {
        let Device { name, multiprocessors, clock, bandwidth, .. } = device;
        let needed = bandwidth / f64::from(*multiprocessors) * LATENCY / 1024.0;
        let _ = writeln!(
            page,
            "\n### {name}\n\n{multiprocessors} multiprocessors, {clock} GHz, {bandwidth} GB/s; at \
             {LATENCY} ns, {needed:.1} KiB per multiprocessor must be in flight.\n"
        );
        *page += BOUND_COLUMNS;
        let kernels = self.kernels.iter().filter(|k| k.architecture == device.architecture);
        for kernel in kernels {
            let shared = usize::try_from(kernel.shared_bytes).unwrap_or(usize::MAX);
            let warps = device.limits.resident_warps(kernel.registers, shared, kernel.threads);
            for (i, l) in kernel.loops.iter().enumerate() {
                let [memory, issue, matrix] = l.times(device);
                let bound = match () {
                    () if memory >= issue.max(matrix) => "memory",
                    () if issue >= matrix => "issue",
                    () => "matrix units",
                };
                let name = if i == 0 { kernel.problem.as_str() } else { "" };
                let share = |time: f64| format!("{:.0} %", 100.0 * time / memory);
                let matrix = if l.matrix_products == 0 { "–".into() } else { share(matrix) };
                // Of the whole kernel, beside what reading its codes takes.
                let whole = if i == 0 {
                    share(issue * kernel.per_code() / l.per_code())
                } else {
                    String::new()
                };
                let flight = f64::from(warps * l.wide_loads) * 0.5;
                let _ = writeln!(
                    page,
                    "| {name} | {} | {:.3} | {} | {whole} | {matrix} | {bound} | {warps} | {flight:.1} |",
                    l.name,
                    memory,
                    share(issue),
                );
            }
        }
    }

    /// The data of the page.
    ///
    /// # Errors
    ///
    /// None that is known: all of it can be written.
    pub fn data(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

const HEADER: &str = "\
# GPU machine code

What the kernels become on NVIDIA devices. Generated by `cargo xtask codegen --write` from the real
launch code, with NVIDIA's compiler and assembler 12.8 and no device; `cargo xtask test` fails if it
is stale, if a kernel spills registers or if its main loops load codes less than 128 bits wide. The
same as data: `kivi-cuda/codegen.json`. How the loops work and why:
[Attention over codes on a GPU](../explanation/gpu-attention.md).

Instructions are those of the whole loop: addresses, loads, folding, products, sums. *per code* is
instructions of a thread over codes that it unpacks; a product of matrix units is one instruction
and serves up to 8 query rows. *whole* is the same for the whole kernel, with all that is outside
the loops (parameters, softmax, results), for a full split of 512 tokens; the average over keys and
values. With 8 query rows the softmax of 8 rows is in it.

For a device, *memory* is the time per code that reading 3/8 of a byte (2-bit codes, groups of 32;
5/8 at 4 bits) takes at the published bandwidth, in picoseconds; *issue* and *matrix units* are the
times that the schedulers and the matrix units need, as shares of it, *whole* the schedulers' for
the whole kernel. Below 100 % memory is the bound. *in flight* are the KiB that the resident warps ask for at once.
";

const COUNT_COLUMNS: &str = "\
| kernel | loop | instructions | codes | per code | 128-bit loads | registers | spilled bytes | shared memory | whole |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
";

const BOUND_COLUMNS: &str = "\
| kernel | loop | memory, ps | issue | whole | matrix units | bound | resident warps | in flight |
|---|---|---:|---:|---:|---:|---|---:|---:|
";

/// Writes what a kernel became to `folder`.
fn keep(
    folder: &Path,
    problem: &Problem,
    architecture: Architecture,
    number: usize,
    kernel: &Recorded,
    assembled: &Assembled,
) -> Result<(), CodegenError> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let name: String = problem.name.chars().map(plain).collect();
    let file = |extension: &str| {
        folder.join(format!("{name}.{number}.{}.{architecture}.{extension}", kernel.entry))
    };
    std::fs::write(file("cu"), &kernel.source)?;
    std::fs::write(file("ptx"), &assembled.ptx)?;
    std::fs::write(file("sass"), &assembled.machine_code)?;
    Ok(())
}

fn describe(
    problem: &Problem,
    architecture: Architecture,
    kernel: &Recorded,
    assembled: &Assembled,
) -> Result<Kernel, CodegenError> {
    let code = inspect(&assembled.machine_code, problem.bits, problem.masks)?;
    let dynamic = u32::try_from(kernel.shared_bytes).unwrap_or(u32::MAX);
    // A scale and a zero of 16 bits per group.
    let bits = f64::from(problem.bits) + 32.0 / f64::from(problem.group_size);
    let unnamed = "?".to_owned();
    let loops = code.loops.into_iter().enumerate().map(|(i, found)| Loop {
        name: problem.loops.get(i).map_or(unnamed.clone(), |&name| name.to_owned()),
        instructions: found.instructions,
        codes: found.codes,
        bytes_per_code: bits / 8.0,
        matrix_products: found.matrix_products,
        wide_loads: found.wide_loads,
        narrow_loads: found.narrow_loads,
        opcodes: found.opcodes,
    });
    Ok(Kernel {
        problem: problem.name.clone(),
        function: kernel.entry.clone(),
        architecture,
        registers: assembled.registers,
        spill_bytes: assembled.spill_bytes,
        stack_bytes: assembled.stack_bytes,
        shared_bytes: assembled.shared_bytes.saturating_add(dynamic),
        threads: kernel.threads(),
        outside: code.outside,
        codes_per_thread: problem.codes_per_thread,
        loops: loops.collect(),
    })
}
