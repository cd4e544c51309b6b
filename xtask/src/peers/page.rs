//! The generated part of the page: machine, versions, tables, commands.

use super::results::{COLUMNS, Column, Depth, KIVI, LLAMA, Measured, Shape, column};
use super::{Results, build};
use std::fmt::Write;

/// Everything between the markers.
pub(super) fn render(results: &Results) -> String {
    let machine = &results.machine;
    let mut page = format!(
        "\nMeasured on {date}.\n\n| | |\n|---|---|\n\
         | processor | {processor}, {cores} cores |\n\
         | instruction sets | {sets} |\n\
         | last-level cache | {cache} MiB |\n\
         | threads | {threads} each |\n\
         | rounds | {rounds} |\n\
         | kivi | {kivi} |\n\
         | llama.cpp | {llama}, from `llama-cpp-python` {package}, compiled by {compiler} |\n",
        date = results.date,
        processor = machine.processor,
        cores = machine.cores,
        sets = machine.instruction_sets.join(", "),
        cache = machine.last_level_cache >> 20,
        threads = results.plan.threads,
        rounds = results.plan.rounds,
        kivi = results.kivi_version,
        llama = results.llama_commit,
        package = build::PACKAGE_VERSION,
        compiler = results.compiler,
    );
    page += "\n### Attention\n\nMilliseconds per call:\n\n";
    page += &attention_table(&results.attention);
    page += "\n### Decoding\n\nTokens per second:\n\n";
    page += &generation_table(&results.generation);
    page += "\n### Commands\n\n";
    let plan = &results.plan;
    let mut commands = String::new();
    let mut line = |program: &str, arguments: Vec<String>| {
        let _ = writeln!(commands, "{program} {}", arguments.join(" "));
    };
    if let Some(measured) = results.attention.last() {
        line("peer-attention", plan.llama_attention(&measured.case, machine));
        line("kivi", plan.kivi_attention(&measured.case));
    }
    if let Some(measured) = results.generation.last() {
        let model = results.model.file_name().unwrap_or_default().to_string_lossy();
        line("llama-bench", plan.llama_generate(&model, measured.case, "q4_0"));
        line("kivi", plan.kivi_generate(&model, measured.case));
    }
    let _ = write!(page, "Of the last row of each table:\n\n```text\n{commands}```\n");
    page
}

/// Milliseconds; the ratios say how many times faster kivi2 is.
pub(super) fn attention_table(rows: &[Measured<Shape>]) -> String {
    let mut table = heading(&["heads", "head_dim", "tokens"]);
    for row in rows {
        let Shape { tokens, query_heads, kv_heads, head_dim } = row.case;
        let case = [format!("{query_heads}/{kv_heads}"), head_dim.to_string(), grouped(tokens)];
        table += &line(&case, row, |theirs, ours| theirs / ours);
    }
    table
}

/// Tokens per second; the ratios say how many times faster kivi2 is.
pub(super) fn generation_table(rows: &[Measured<Depth>]) -> String {
    let mut table = heading(&["depth"]);
    for row in rows {
        table += &line(&[grouped(row.case.0)], row, |theirs, ours| ours / theirs);
    }
    table
}

/// What kivi2 is compared with.
const BASELINES: [&str; 2] = ["f16", "q4_0"];

fn heading(case: &[&str]) -> String {
    // kivi's own formats bear its name.
    let columns = COLUMNS.iter().map(|Column { program, format }| match format {
        format if format.starts_with(program) => (*format).to_owned(),
        format => format!("{program} {format}"),
    });
    let ratios = BASELINES.iter().map(|format| format!("kivi2 : {LLAMA} {format}"));
    let cells: Vec<String> =
        case.iter().map(|name| (*name).to_owned()).chain(columns).chain(ratios).collect();
    format!("| {} |\n|{}\n", cells.join(" | "), "---:|".repeat(cells.len()))
}

fn line<K>(case: &[String], row: &Measured<K>, faster: impl Fn(f64, f64) -> f64) -> String {
    let median = |program: &str, format: &str| row.median(column(program, format)?);
    let value = |Column { program, format }: &Column| {
        median(program, format).map_or_else(|| "–".to_owned(), significant)
    };
    let ratio = |format: &&str| {
        let ratio = faster(median(LLAMA, format)?, median(KIVI, "kivi2")?);
        Some(format!("{ratio:.2}"))
    };
    let ratios = BASELINES.iter().map(|format| ratio(format).unwrap_or_else(|| "–".to_owned()));
    let cells: Vec<String> =
        case.iter().cloned().chain(COLUMNS.iter().map(value)).chain(ratios).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// Three significant digits, for values from 0.001 on.
fn significant(value: f64) -> String {
    match value {
        ..1.0 => format!("{value:.3}"),
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A whole number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
