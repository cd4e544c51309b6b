//! Sequences in host memory.

use crate::Result;
use kivi_core::{CanonicalLayer, DecoderBackend, SequenceId};
use kivi_models::Session;

/// A sequence that was swapped out: its packed pages and full-precision tokens in canonical form.
#[derive(Debug)]
pub(crate) struct Swapped {
    pub(crate) tokens: usize,
    layers: Vec<CanonicalLayer>,
}

impl Swapped {
    /// Copies a sequence to the host; `None` if it could not be restored exactly: a truncation has
    /// left fewer full-precision copies than a restored sequence would have.
    pub(crate) fn out<B: DecoderBackend>(
        session: &Session<B>,
        id: SequenceId,
    ) -> Result<Option<Self>> {
        let layout = session.state().layout(id)?;
        let policy = session.state().policy();
        let closed = (policy.packed(layout.tokens), policy.kept(layout.tokens));
        if (layout.packed, layout.kept) != closed {
            return Ok(None);
        }
        Ok(Some(Self { tokens: layout.tokens, layers: session.export(id)? }))
    }

    /// Brings it back as a new sequence.
    pub(crate) fn back<B: DecoderBackend>(&self, session: &mut Session<B>) -> Result<SequenceId> {
        Ok(session.import(self.tokens, &self.layers)?)
    }

    /// Bytes on the host.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().map(CanonicalLayer::host_bytes).sum()
    }
}
