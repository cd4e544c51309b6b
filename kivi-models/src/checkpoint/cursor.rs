//! A bounds-checked reader over the bytes of a GGUF file.

use crate::{Error, Result};

/// Reads little-endian values from `bytes`, front to back; never panics, never allocates.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Bytes left.
    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `count` bytes; `what` is named in the error.
    pub(super) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8]> {
        let left = self.remaining();
        match usize::try_from(count) {
            Ok(count) if count <= left => {
                let taken = &self.bytes[self.position..self.position + count];
                self.position += count;
                Ok(taken)
            }
            _ => Err(Error::gguf(format!(
                "{what} needs {count} bytes at byte {}, {left} are left",
                self.position
            ))),
        }
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least` bytes each, refused when the rest of the file
    /// could not hold them: what a loop runs or a vector grows to is bounded by the file's length.
    pub(super) fn count(&mut self, least: u64, what: &str) -> Result<u64> {
        let count = self.u64(what)?;
        let room = self.remaining() as u64 / least;
        if count > room {
            return Err(Error::gguf(format!("{what} is {count}, the file has room for {room}")));
        }
        Ok(count)
    }

    /// A string: u64 length, then UTF-8 bytes without terminator.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str> {
        let length = self.u64(what)?;
        let start = self.position;
        std::str::from_utf8(self.take(length, what)?)
            .map_err(|_| Error::gguf(format!("{what} at byte {start} is not UTF-8")))
    }
}
