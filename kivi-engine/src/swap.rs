//! Sequences in host memory.

use crate::Result;
use kivi_core::{DecoderBackend, Error as CoreError, SequenceId, Snapshot};
use kivi_models::{Error as ModelError, Session};

/// A sequence that was swapped out: its packed pages and full-precision tokens in canonical form.
#[derive(Debug)]
pub(crate) struct Swapped(Snapshot);

impl Swapped {
    /// Copies a sequence that holds `tokens` to the host; `None` if it could not be restored exactly: a
    /// truncation has left fewer full-precision copies than a restored sequence would have, say.
    pub(crate) fn out<B: DecoderBackend>(
        session: &Session<B>,
        id: SequenceId,
        tokens: &[u32],
    ) -> Result<Option<Self>> {
        match session.snapshot(id, tokens) {
            Ok(snapshot) => Ok(Some(Self(snapshot))),
            Err(ModelError::Core(CoreError::InvalidRequest { .. })) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Brings it back as a new sequence.
    pub(crate) fn back<B: DecoderBackend>(&self, session: &mut Session<B>) -> Result<SequenceId> {
        Ok(session.restore(&self.0)?)
    }

    /// Bytes on the host.
    pub(crate) fn bytes(&self) -> usize {
        self.0.host_bytes()
    }
}
