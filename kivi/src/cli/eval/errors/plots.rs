//! Magnitudes of keys and values as heat maps, after the paper's Figure 2.

use super::measure::Layer;
use crate::cli::plot::HeatMap;
use anyhow::Result;
use std::path::Path;

/// Rows of a map: each is the mean magnitude of some consecutive tokens.
const ROWS: usize = 32;

/// Writes `keys-layer-N.svg` and `values-layer-N.svg`, of the first kv head.
pub(super) fn magnitudes(layer: &Layer<'_>, folder: &Path, number: usize) -> Result<()> {
    for (name, x) in [("keys", &layer.keys), ("values", &layer.values)] {
        let tokens = layer.tokens();
        let rows = ROWS.min(tokens);
        let start = |row: usize| row * tokens / rows;
        let mean = |row: usize, channel: usize| {
            let range = start(row)..start(row + 1);
            let count = range.len().max(1) as f64;
            let at = |token: usize| x[token * layer.kv_heads * layer.width + channel];
            range.map(|token| f64::from(at(token).abs())).sum::<f64>() / count
        };
        let values: Vec<Vec<f64>> = (0..rows)
            .map(|row| (0..layer.width).map(|channel| mean(row, channel)).collect())
            .collect();
        let largest = values.iter().flatten().copied().fold(0.0, f64::max);
        let map = HeatMap {
            title: &format!("Magnitude of the {name}, layer {number}, kv head 0"),
            x: "channel",
            y: "token",
            columns: (0..layer.width).map(|channel| channel.to_string()).collect(),
            rows: (0..rows).map(|row| start(row).to_string()).collect(),
            values,
            range: (0.0, largest),
            percent: false,
        };
        map.save(&folder.join(format!("{name}-layer-{number}.svg")))?;
    }
    Ok(())
}
