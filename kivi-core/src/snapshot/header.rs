//! The header of a file: everything about a snapshot but the ids of its tokens and its arrays.

use super::{ModelIdentity, SnapshotError, SnapshotHeader};
use crate::{
    Bits, CacheConfig, Format, KeyValue, LayerSpec, Promotion, Rope, RopeStyle, StoreDtype,
    ValueResidual,
};

/// Bytes before the frequencies.
const FIXED: usize = 124;
/// Bytes of a layer.
const LAYER: usize = 28;
/// Bytes of the longest header: 2¹⁵ frequencies, since a head has at most 2¹⁶ channels, and 4096
/// layers.
pub(super) const LONGEST: usize = FIXED + 4 * (1 << 15) + LAYER * super::MOST_LAYERS;

/// The header as it lies in a file.
pub(super) fn encode(header: &SnapshotHeader) -> Vec<u8> {
    let SnapshotHeader { model, config, layers, tokens, packed, kept } = header;
    let mut out = Vec::with_capacity(FIXED);
    out.extend(model.fingerprint);
    for count in [tokens.len(), packed.keys, packed.values, kept.keys, kept.values] {
        out.extend((count as u64).to_le_bytes());
    }
    let block = config.value_residual() == ValueResidual::Block;
    let interleaved = model.rope.style == RopeStyle::Interleaved;
    // Each is at most 2²⁴, as the configuration has checked.
    for length in [
        config.group_size(),
        config.residual_length(),
        config.sink_length(),
        config.rollback_length(),
        config.page_tokens(),
        config.segment_tokens().unwrap_or(0),
        usize::from(block),
    ] {
        out.extend((length as u32).to_le_bytes());
    }
    out.extend(encode_format(config.key()));
    out.extend(encode_format(config.value()));
    out.extend(u32::from(interleaved).to_le_bytes());
    out.extend(model.rope.attention_factor.to_le_bytes());
    out.extend((model.rope.frequencies.len() as u32).to_le_bytes());
    out.extend((layers.len() as u32).to_le_bytes());
    for frequency in &model.rope.frequencies {
        out.extend(frequency.to_le_bytes());
    }
    for (layer, &beside) in layers.iter().zip(&model.key_bias_beside) {
        out.extend((layer.kv_heads as u32).to_le_bytes());
        out.extend((layer.head_dim as u32).to_le_bytes());
        out.extend((layer.window.unwrap_or(0) as u64).to_le_bytes());
        out.extend(encode_format(layer.format.keys));
        out.extend(encode_format(layer.format.values));
        out.extend(u32::from(beside).to_le_bytes());
    }
    out
}

fn encode_format(format: Format) -> [u8; 4] {
    let bits = format.bits.map_or(0, Bits::get) as u8;
    let store = match format.store {
        StoreDtype::F16 => 0,
        StoreDtype::Bf16 => 1,
        StoreDtype::F32 => 2,
    };
    let [low, high] = format.promoted.map_or(0, Promotion::ten_thousandths).to_le_bytes();
    [bits, store, low, high]
}

/// The header, still without token ids, and how many of these follow.
pub(super) fn decode(bytes: &[u8]) -> Result<(SnapshotHeader, usize), SnapshotError> {
    let mut fields = Fields { rest: bytes };
    let fingerprint = fields.take()?;
    let tokens = fields.length()?;
    let mut pair = || Ok(KeyValue::new(fields.length()?, fields.length()?));
    let (packed, kept) = (pair()?, pair()?);

    let mut lengths = [0; 6];
    for length in &mut lengths {
        *length = fields.count()?;
    }
    let [group, residual, sinks, rollback, page, segment] = lengths;
    let value_residual = match fields.switch("value residual")? {
        false => ValueResidual::Window,
        true => ValueResidual::Block,
    };
    let config = CacheConfig::builder()
        .key(fields.format()?)
        .value(fields.format()?)
        .group_size(group)
        .residual_length(residual)
        .sink_length(sinks)
        .rollback_length(rollback)
        .page_tokens(page)
        .segment_tokens((segment > 0).then_some(segment))
        .value_residual(value_residual)
        .build()
        .map_err(SnapshotError::invalid)?;

    let style = match fields.switch("rotary style")? {
        false => RopeStyle::Halves,
        true => RopeStyle::Interleaved,
    };
    let attention_factor = f32::from_le_bytes(fields.take()?);
    let (pairs, layer_count) = (fields.count()?, fields.count()?);
    // Before anything is allocated for them.
    let length = FIXED as u64 + 4 * pairs as u64 + LAYER as u64 * layer_count as u64;
    if length != bytes.len() as u64 {
        return Err(SnapshotError::invalid(format!(
            "a header of {} bytes with {pairs} frequencies and {layer_count} layers",
            bytes.len()
        )));
    }
    let mut frequencies = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        frequencies.push(f32::from_le_bytes(fields.take()?));
    }
    let mut layers = Vec::with_capacity(layer_count);
    let mut key_bias_beside = Vec::with_capacity(layer_count);
    for _ in 0..layer_count {
        let (kv_heads, head_dim) = (fields.count()?, fields.count()?);
        let window = fields.length()?;
        let format = KeyValue::new(fields.format()?, fields.format()?);
        layers.push(LayerSpec {
            kv_heads,
            head_dim,
            format,
            window: (window > 0).then_some(window),
        });
        key_bias_beside.push(fields.switch("key bias")?);
    }
    let rope = Rope { style, frequencies, attention_factor };
    let model = ModelIdentity { fingerprint, rope, key_bias_beside };
    let header = SnapshotHeader { model, config, layers, tokens: Vec::new(), packed, kept };
    Ok((header, tokens))
}

/// The bytes of a header that are still to be read.
struct Fields<'a> {
    rest: &'a [u8],
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let Some((first, rest)) = self.rest.split_first_chunk() else {
            return Err(SnapshotError::invalid("the header is too short"));
        };
        self.rest = rest;
        Ok(*first)
    }

    fn count(&mut self) -> Result<usize, SnapshotError> {
        usize::try_from(u32::from_le_bytes(self.take()?)).map_err(SnapshotError::invalid)
    }

    fn length(&mut self) -> Result<usize, SnapshotError> {
        let length = u64::from_le_bytes(self.take()?);
        // Sums of two stay far from overflow.
        match usize::try_from(length) {
            Ok(length) if length <= usize::MAX / 4 => Ok(length),
            _ => Err(SnapshotError::invalid(format!("a length of {length}"))),
        }
    }

    fn switch(&mut self, what: &str) -> Result<bool, SnapshotError> {
        match u32::from_le_bytes(self.take()?) {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(SnapshotError::invalid(format!("{what} {other}, not 0 or 1"))),
        }
    }

    fn format(&mut self) -> Result<Format, SnapshotError> {
        let [bits, store, low, high] = self.take()?;
        let store = match store {
            0 => StoreDtype::F16,
            1 => StoreDtype::Bf16,
            2 => StoreDtype::F32,
            other => return Err(SnapshotError::invalid(format!("store type {other}"))),
        };
        let known = Bits::ALL.into_iter().find(|known| known.get() == usize::from(bits));
        if known.is_none() && bits != 0 {
            return Err(SnapshotError::invalid(format!("codes of {bits} bits")));
        }
        let format = Format::new(known, store);
        match u16::from_le_bytes([low, high]) {
            0 => Ok(format),
            share => Promotion::of_ten_thousandths(share)
                .and_then(|promotion| format.with_promotion(promotion))
                .map_err(SnapshotError::invalid),
        }
    }
}
