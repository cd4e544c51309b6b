//! Writing a snapshot.

use super::{MAGIC, Snapshot, SnapshotError, VERSION, header};
use crate::{CanonicalLayer, Error, Format, FullTokens, LayerSpec, Result, StoreDtype};
use half::{bf16, f16};
use sha2::{Digest, Sha256};
use std::{
    io::{BufWriter, Write},
    path::Path,
};

impl Snapshot {
    /// Writes the file format and returns its bytes.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn write_to(&self, output: impl Write) -> Result<u64> {
        Ok(self.write(output).map_err(SnapshotError::write)?)
    }

    /// Writes a file and returns its bytes. The file is complete or not there at all: it is written
    /// under another name in the same folder, to the disk, and then takes the place of what was at
    /// `path`. Only its owner may read it.
    ///
    /// # Errors
    /// [`SnapshotError::Io`], with the file named; what was at `path` is then still there.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64> {
        let path = path.as_ref();
        let save = || {
            // A link stays one.
            let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
            let mut file = tempfile::Builder::new()
                .prefix(".kivi-snapshot-")
                .tempfile_in(folder.unwrap_or(Path::new(".")))?;
            let mut output = BufWriter::new(file.as_file_mut());
            let bytes = self.write(&mut output)?;
            output.flush()?;
            drop(output);
            file.as_file().sync_all()?;
            file.persist(&target).map_err(|error| error.error)?;
            Ok(bytes)
        };
        save().map_err(|source| {
            let error = Box::new(SnapshotError::write(source));
            Error::from(SnapshotError::InFile { path: path.to_owned(), error })
        })
    }

    fn write(&self, output: impl Write) -> std::io::Result<u64> {
        let mut output = Hashing { output, hash: Sha256::new(), bytes: 0 };
        let header = header::encode(&self.header);
        output.put(&MAGIC)?;
        output.put(&VERSION.to_le_bytes())?;
        output.put(&(header.len() as u32).to_le_bytes())?;
        output.put(&header)?;
        let digest = output.hash.clone().finalize();
        output.put(&digest)?;
        output.array(&self.header.tokens, u32::to_le_bytes)?;
        for (layer, spec) in self.layers.iter().zip(&self.header.layers) {
            output.layer(layer, spec)?;
        }
        let digest = output.hash.clone().finalize();
        output.put(&digest)?;
        Ok(output.bytes)
    }
}

/// Writes and hashes.
struct Hashing<W> {
    output: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.output.write_all(bytes)?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn array<T: Copy, const N: usize>(
        &mut self,
        elements: &[T],
        to_bytes: impl Fn(T) -> [u8; N],
    ) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        for chunk in elements.chunks(1 << 14) {
            bytes.clear();
            bytes.extend(chunk.iter().flat_map(|&element| to_bytes(element)));
            self.put(&bytes)?;
        }
        Ok(())
    }

    fn halves(&mut self, elements: &[f16]) -> std::io::Result<()> {
        self.array(elements, f16::to_le_bytes)
    }

    fn full(&mut self, tokens: &FullTokens, format: Format) -> std::io::Result<()> {
        match format.store {
            StoreDtype::F16 => self.array(&tokens.data, |x| f16::from_f32(x).to_le_bytes()),
            StoreDtype::Bf16 => self.array(&tokens.data, |x| bf16::from_f32(x).to_le_bytes()),
            StoreDtype::F32 => self.array(&tokens.data, f32::to_le_bytes),
        }
    }

    fn layer(&mut self, layer: &CanonicalLayer, spec: &LayerSpec) -> std::io::Result<()> {
        self.full(&layer.sinks.keys, spec.format.keys)?;
        self.full(&layer.sinks.values, spec.format.values)?;
        if let Some(keys) = &layer.packed_keys {
            self.array(&keys.codes, u32::to_le_bytes)?;
            self.halves(&keys.scales)?;
            self.halves(&keys.zeros)?;
            if let Some(promoted) = &keys.promoted {
                self.array(&promoted.mask, u32::to_le_bytes)?;
                self.array(&promoted.lo, u32::to_le_bytes)?;
            }
        }
        if let Some(values) = &layer.packed_values {
            self.array(&values.codes, u32::to_le_bytes)?;
            self.halves(&values.scales)?;
            self.halves(&values.zeros)?;
        }
        self.full(&layer.full.keys, spec.format.keys)?;
        self.full(&layer.full.values, spec.format.values)
    }
}
