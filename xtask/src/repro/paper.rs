//! Figures of the paper (arXiv 2402.02750v2), as printed there.

/// Configuration, bits, grouping of keys and values; CoQA and TruthfulQA of Llama-2-13B with everything
/// quantized (Table 1).
pub(super) const TABLE_1: [(&str, u64, [&str; 2], [&str; 2]); 5] = [
    ("4 bits, both per token", 4, [TOKEN, TOKEN], ["66.48", "29.51"]),
    ("2 bits, both per token", 2, [TOKEN, TOKEN], ["52.93", "24.98"]),
    ("2 bits, both per channel", 2, [CHANNEL, CHANNEL], ["2.88", "0.74"]),
    ("2 bits, keys per token, values per channel", 2, [TOKEN, CHANNEL], ["2.80", "0.26"]),
    ("2 bits, keys per channel, values per token", 2, [CHANNEL, TOKEN], ["63.53", "28.60"]),
];

const TOKEN: &str = "per token";
const CHANNEL: &str = "per channel";

/// Tensor, grouping; error of the tensor and of attention, Llama-2-13B. The values' attention errors
/// are given as a ratio in the text.
pub(super) const TABLE_2: [(&str, &str, [&str; 2]); 4] = [
    ("keys", TOKEN, ["13.67", "47.00"]),
    ("keys", CHANNEL, ["4.55", "9.60"]),
    ("values", TOKEN, ["4.57", "1/15 of per channel"]),
    ("values", CHANNEL, ["comparable", "15 times per token"]),
];

/// 16 bits, KIVI-4, KIVI-2: CoQA, TruthfulQA and GSM8K of Llama-2-7B, then of Llama-2-13B.
pub(super) const TABLE_3: [[&str; 6]; 3] = [
    ["63.88", "30.76", "13.50", "66.37", "29.53", "22.67"],
    ["63.78", "30.80", "13.80", "66.38", "29.49", "23.65"],
    ["63.05", "33.95", "12.74", "66.23", "29.84", "20.77"],
];

/// 16 bits, KIVI-4, KIVI-2: LongBench averages of Llama2-7B and Mistral-7B.
pub(super) const TABLE_4: [[&str; 2]; 3] =
    [["44.52", "46.58"], ["44.59", "46.56"], ["44.27", "45.85"]];

/// GSM8K of Llama-2-13B by group size, at a residual of 128.
pub(super) const TABLE_5_GROUP: &[(&str, &str)] =
    &[("32", "20.77"), ("64", "21.00"), ("128", "17.29")];

/// GSM8K of Llama-2-13B by residual length, at groups of 32. The copy at hand names two of four.
pub(super) const TABLE_5_RESIDUAL: &[(&str, &str)] =
    &[("32", "20.62"), ("64", "-"), ("96", "-"), ("128", "20.77")];
