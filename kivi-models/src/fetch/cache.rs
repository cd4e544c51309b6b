//! The folder of verified model files.

use super::Attempt;
use super::known::KnownModel;
use super::progress::Meter;
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};

/// The end of the names of everything unfinished.
pub(super) const UNFINISHED: &str = ".part";

const CHUNK: usize = 1 << 20;

/// A folder with model files under their own names. Files appear in it complete and verified, by
/// renaming, or not at all.
pub(super) struct Cache {
    dir: PathBuf,
}

/// Proof that no other process downloads into the folder; ends with the value or the process.
pub(super) struct Lock<'a> {
    cache: &'a Cache,
    /// Holds the lock; absent on file systems without locks.
    file: Option<File>,
}

impl Cache {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the model's file is, once it is there.
    pub(super) fn path(&self, model: &KnownModel) -> PathBuf {
        self.dir.join(model.file)
    }

    /// The model's file, if it is there and has the right content.
    pub(super) fn find(&self, model: &KnownModel) -> Result<PathBuf, Attempt> {
        let path = self.path(model);
        match verify(&path, model) {
            Ok(()) => Ok(path),
            Err(reason) => {
                if path.exists() {
                    tracing::warn!("{} is not used: {reason}", path.display());
                }
                Err(Attempt { source: self.dir.display().to_string(), reason })
            }
        }
    }

    /// Waits until no other process downloads into the folder, which is created if need be.
    pub(super) fn lock(&self) -> Result<Lock<'_>> {
        let path = self.dir.join(".lock");
        let fail = |source| Error::Write { path: path.clone(), source };
        fs::create_dir_all(&self.dir).map_err(fail)?;
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(fail)?;
        let locked = match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                tracing::info!(
                    "waiting for another process that downloads into {}",
                    self.dir.display()
                );
                file.lock()
            }
            Err(TryLockError::Error(error)) => Err(error),
            Ok(()) => Ok(()),
        };
        if let Err(error) = &locked {
            tracing::warn!("cannot lock {}: {error}", path.display());
        }
        Ok(Lock { cache: self, file: locked.ok().map(|()| file) })
    }

    /// Copies `content` into the folder; it must be the model's file and no byte more.
    ///
    /// Until everything is written and verified, the bytes are in a temporary file that is removed
    /// on any error.
    pub(super) fn install(
        &self,
        model: &KnownModel,
        content: impl Read,
        meter: &Meter,
    ) -> Result<PathBuf, String> {
        let mut temporary = tempfile::Builder::new();
        temporary.prefix(model.file).suffix(UNFINISHED);
        #[cfg(unix)]
        {
            // The umask applies as for any other file; temporary files are private by default.
            use std::os::unix::fs::PermissionsExt;
            temporary.permissions(fs::Permissions::from_mode(0o666));
        }
        let cannot_write = |error: io::Error| {
            format!("cannot write {} bytes to {}: {error}", model.bytes, self.dir.display())
        };
        let mut temporary = temporary.tempfile_in(&self.dir).map_err(cannot_write)?;
        // One byte more than expected tells a file that is too long.
        let mut content = content.take(model.bytes.saturating_add(1));
        let (mut hash, mut length, mut buffer) = (Sha256::new(), 0_u64, vec![0; CHUNK]);
        loop {
            let n = match content.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(|error| format!("broken after {length} bytes: {error}"))?,
            };
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            temporary.write_all(&buffer[..n]).map_err(cannot_write)?;
            length += n as u64;
            meter.advance(n as u64);
        }
        check(model, length, || Ok(hash.finalize().into()))?;
        temporary.as_file().sync_all().map_err(cannot_write)?;
        let path = self.path(model);
        temporary.persist(&path).map_err(|error| cannot_write(error.error))?;
        Ok(path)
    }
}

impl Lock<'_> {
    /// Removes what interrupted downloads left behind. Only who holds the lock can tell that nobody
    /// is still writing.
    pub(super) fn remove_leftovers(&self) {
        let (Some(_), Ok(entries)) = (&self.file, fs::read_dir(&self.cache.dir)) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            if !path.to_string_lossy().ends_with(UNFINISHED) {
                continue;
            }
            // `is_dir` follows links, so that a link is removed and not what it points to.
            let removed = if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            match removed {
                Ok(()) => tracing::info!("removed the interrupted download {}", path.display()),
                Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
            }
        }
    }
}

/// Checks that `path` holds the model's file: the length first, then every byte.
pub(super) fn verify(path: &Path, model: &KnownModel) -> Result<(), String> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("{} is not there", model.file));
        }
        opened => opened.map_err(|error| format!("cannot open {}: {error}", model.file))?,
    };
    let cannot_read = |error| format!("cannot read {}: {error}", model.file);
    let length = file.metadata().map_err(cannot_read)?.len();
    check(model, length, || {
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hash.finalize().into()),
                Ok(n) => hash.update(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(cannot_read(error)),
            }
        }
    })
}

fn check(
    model: &KnownModel,
    length: u64,
    hash: impl FnOnce() -> Result<[u8; 32], String>,
) -> Result<(), String> {
    if length != model.bytes {
        return Err(format!("{} has {length} bytes, expected {}", model.file, model.bytes));
    }
    let found = hash()?.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    if found != model.sha256 {
        return Err(format!("{} has SHA-256 {found}, expected {}", model.file, model.sha256));
    }
    Ok(())
}
