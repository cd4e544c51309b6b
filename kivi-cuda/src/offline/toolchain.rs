//! From CUDA C++ to machine code with NVIDIA's tools, as Python packages unpack them.

use super::nvrtc::Nvrtc;
use super::{Architecture, CodegenError};
use std::path::{Path, PathBuf};
use std::process::Command;

/// NVRTC, ptxas and nvdisasm in a folder that `pip install --target` filled.
pub struct Toolchain {
    nvrtc: Nvrtc,
    includes: [PathBuf; 2],
    ptxas: PathBuf,
    nvdisasm: PathBuf,
    scratch: tempfile::TempDir,
}

/// What the assembler says of a kernel, and its disassembly.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// PTX.
    pub ptx: String,
    /// Disassembly by nvdisasm.
    pub machine_code: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of registers stored to and loaded from local memory.
    pub spill_bytes: u32,
    /// Bytes of local memory per thread: spills and arrays with run-time indices.
    pub stack_bytes: u32,
    /// Static shared memory in bytes.
    pub shared_bytes: u32,
}

impl Toolchain {
    /// The tools in `folder`.
    ///
    /// # Errors
    ///
    /// [`CodegenError::Missing`] names the first file that is not there.
    pub fn open(folder: &Path) -> Result<Self, CodegenError> {
        let part = |path: &str| {
            let path = folder.join("nvidia").join(path);
            if path.exists() { Ok(path) } else { Err(CodegenError::Missing(path)) }
        };
        Ok(Self {
            nvrtc: Nvrtc::open(&part("cuda_nvrtc/lib/libnvrtc.so.12")?)?,
            // The second holds `crt/mma.h`, which the first's `mma.h` includes.
            includes: [part("cuda_runtime/include")?, part("cuda_nvcc/include")?],
            ptxas: part("cuda_nvcc/bin/ptxas")?,
            nvdisasm: part("cu13/bin/nvdisasm")?,
            scratch: tempfile::tempdir()?,
        })
    }

    /// Compiles with the options that CubeCL passes; returns PTX.
    ///
    /// # Errors
    ///
    /// What NVRTC says.
    pub fn ptx(&self, source: &str, architecture: Architecture) -> Result<String, CodegenError> {
        let mut options = vec![format!("--gpu-architecture={}", architecture.target())];
        options.push("-lineinfo".into());
        options.extend(self.includes.iter().map(|i| format!("--include-path={}", i.display())));
        self.nvrtc.compile(source, &options)
    }

    /// Compiles, assembles and disassembles.
    ///
    /// # Errors
    ///
    /// What the first tool that fails prints.
    pub fn assemble(
        &self,
        source: &str,
        architecture: Architecture,
    ) -> Result<Assembled, CodegenError> {
        let ptx = self.ptx(source, architecture)?;
        let target = architecture.target();
        let file = |extension: &str| self.scratch.path().join("kernel").with_extension(extension);
        let (assembly, binary) = (file("ptx"), file("cubin"));
        std::fs::write(&assembly, &ptx)?;
        let mut ptxas = Command::new(&self.ptxas);
        ptxas.arg(format!("-arch={target}")).arg("-v").arg(&assembly).arg("-o").arg(&binary);
        let messages = run(ptxas)?;
        let mut nvdisasm = Command::new(&self.nvdisasm);
        nvdisasm.arg("-c").arg(&binary);
        let machine_code = run(nvdisasm)?;

        let number = |unit: &str| {
            number_before(&messages, unit).ok_or_else(|| CodegenError::Unreadable {
                what: format!("ptxas: no number before {unit:?}"),
            })
        };
        Ok(Assembled {
            registers: number(" registers")?,
            spill_bytes: number(" bytes spill stores")? + number(" bytes spill loads")?,
            stack_bytes: number(" bytes stack frame")?,
            // Only printed if there is any.
            shared_bytes: number_before(&messages, " bytes smem").unwrap_or(0),
            ptx,
            machine_code,
        })
    }
}

/// The number that ends where `unit` begins, at its first place.
fn number_before(text: &str, unit: &str) -> Option<u32> {
    let before = &text[..text.find(unit)?];
    let start = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |i| i + 1);
    before[start..].parse().ok()
}

/// Runs a tool; returns what it printed, on either stream.
fn run(mut command: Command) -> Result<String, CodegenError> {
    let output = command.output()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        let tool = command.get_program().to_string_lossy().into_owned();
        Err(CodegenError::Tool { tool, text })
    }
}

#[cfg(test)]
mod tests {
    use super::number_before;

    #[test]
    fn numbers_of_ptxas() {
        let text = "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
            ptxas info    : Used 96 registers, used 1 barriers, 400 bytes cmem[0]";
        assert_eq!(number_before(text, " registers"), Some(96));
        assert_eq!(number_before(text, " bytes spill loads"), Some(4));
        assert_eq!(number_before(text, " bytes smem"), None);
    }
}
