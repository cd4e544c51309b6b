//! NVIDIA's run-time compiler, loaded from a given file: CUDA C++ to PTX, no driver needed.

use super::CodegenError;
use libloading::{Library, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

/// A handle of NVRTC.
type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

/// The loaded library.
pub(super) struct Nvrtc {
    library: Library,
}

impl Nvrtc {
    /// Loads `libnvrtc` from `file`.
    pub(super) fn open(file: &Path) -> Result<Self, CodegenError> {
        // SAFETY: loading NVIDIA's library runs only its own initialisers.
        let library = unsafe { Library::new(file) };
        let library = library.map_err(|source| CodegenError::Load { file: file.into(), source })?;
        Ok(Self { library })
    }

    /// Compiles `source`; returns PTX.
    pub(super) fn compile(&self, source: &str, options: &[String]) -> Result<String, CodegenError> {
        let text = |text: &str| CString::new(text).map_err(|_| CodegenError::NulByte);
        let source = text(source)?;
        let options: Vec<_> =
            options.iter().map(|option| text(option)).collect::<Result<_, _>>()?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);

        let create: Symbol<'_, Create> = self.function(c"nvrtcCreateProgram")?;
        let compile: Symbol<'_, Compile> = self.function(c"nvrtcCompileProgram")?;
        let destroy: Symbol<'_, Destroy> = self.function(c"nvrtcDestroyProgram")?;

        let mut program = ptr::null_mut();
        let none = ptr::null();
        // SAFETY: the strings end in NUL and outlive the call, no headers are given (0), `program`
        // is written on success only. The signature is that of `nvrtc.h`, as below.
        let created =
            unsafe { create(&raw mut program, source.as_ptr(), none, 0, ptr::null(), ptr::null()) };
        status("nvrtcCreateProgram", created)?;
        // SAFETY: `program` is alive, `options` holds `count` strings that end in NUL.
        let compiled = unsafe { compile(program, count, options.as_ptr()) };
        let result = if compiled == 0 {
            self.text(program, c"nvrtcGetPTXSize", c"nvrtcGetPTX")
        } else {
            self.text(program, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")
                .and_then(|log| Err(CodegenError::Compile { log }))
        };
        // SAFETY: `program` is alive and not used afterwards.
        let destroyed = unsafe { destroy(&raw mut program) };
        let result = result?;
        status("nvrtcDestroyProgram", destroyed)?;
        Ok(result)
    }

    /// A text of `program`, by the pair of functions that give its size and copy it.
    fn text(
        &self,
        program: Program,
        size: &'static std::ffi::CStr,
        get: &'static std::ffi::CStr,
    ) -> Result<String, CodegenError> {
        let size: Symbol<'_, Size> = self.function(size)?;
        let get: Symbol<'_, Text> = self.function(get)?;
        let mut length = 0;
        // SAFETY: `program` is alive, `length` is written.
        status("nvrtcGet…Size", unsafe { size(program, &raw mut length) })?;
        let mut buffer = vec![0_u8; length.max(1)];
        // SAFETY: the buffer has the size asked for, terminating NUL included.
        status("nvrtcGet…", unsafe { get(program, buffer.as_mut_ptr().cast()) })?;
        while buffer.last() == Some(&0) {
            buffer.pop();
        }
        Ok(String::from_utf8_lossy(&buffer).into_owned())
    }

    fn function<T>(&self, name: &'static std::ffi::CStr) -> Result<Symbol<'_, T>, CodegenError> {
        // SAFETY: every caller names the function whose type it asks for; the types are those of
        // `nvrtc.h`, stable since CUDA 7.
        unsafe { self.library.get(name) }
            .map_err(|source| CodegenError::Load { file: "libnvrtc".into(), source })
    }
}

/// An error unless NVRTC's result is 0.
fn status(function: &'static str, result: c_int) -> Result<(), CodegenError> {
    if result == 0 { Ok(()) } else { Err(CodegenError::Nvrtc { function, result }) }
}
