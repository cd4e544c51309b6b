//! Files: mapped into memory if they hold weights, read if they are small.

use crate::{Error, Result};
use bytes::Bytes;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most bytes of a configuration, index or template file; the largest seen have a few MiB.
const MOST_TEXT_BYTES: u64 = 64 << 20;

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    |source| Error::Io { path: path.to_owned(), source }
}

/// The whole file, mapped read-only. The mapping lives as long as the last view into it.
pub(super) fn map(path: &Path) -> Result<Bytes> {
    let file = File::open(path).map_err(io_error(path))?;
    if file.metadata().map_err(io_error(path))?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: a mapping shows the file itself, so the slices made from it are sound only while no
    // one writes to or truncates the file: a write would change bytes that Rust takes for constant,
    // reading past a new end raises SIGBUS. The operating system offers no way to rule that out. We
    // map read-only, never write model files, and ask the same of the user: this is the contract of
    // every program that maps its weights. Every value read from a weight is valid in any bit
    // pattern, and everything that bounds an access was copied out of the file when it was parsed,
    // so changed bytes yield wrong numbers, not wild accesses. Reading instead of mapping would
    // double the memory of a model.
    let mapping = unsafe { memmap2::Mmap::map(&file) }.map_err(io_error(path))?;
    Ok(Bytes::from_owner(mapping))
}

/// The first `N` bytes of a file, `None` if it is shorter.
pub(super) fn magic<const N: usize>(path: &Path) -> Result<Option<[u8; N]>> {
    let mut bytes = [0; N];
    match File::open(path).map_err(io_error(path))?.read_exact(&mut bytes) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(io_error(path)(error)),
    }
}

/// The bytes of a small file, `None` if there is no such file.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(path)(error)),
    };
    let mut bytes = Vec::new();
    file.take(MOST_TEXT_BYTES + 1).read_to_end(&mut bytes).map_err(io_error(path))?;
    if bytes.len() as u64 > MOST_TEXT_BYTES {
        let error = Error::InvalidJson { reason: format!("longer than {MOST_TEXT_BYTES} bytes") };
        return Err(error.in_file(path));
    }
    Ok(Some(bytes))
}
