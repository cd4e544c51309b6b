use super::super::machine::Machine;
use super::super::measure::Plan;
use super::*;
use serde_json::json;

/// One attention case in every column: llama.cpp 123.4, 8.25 and 5, kivi 40, 4, 2 and 0.5 ms.
fn attention() -> Measured<Shape> {
    let shape = Shape { tokens: 32768, query_heads: 9, kv_heads: 3, head_dim: 64 };
    let row = |name: &str, format: &str, milliseconds: f64| {
        json!({
            "tokens": 32768, "query_heads": 9, "kv_heads": 3, "head_dim": 64,
            name: format, "milliseconds": milliseconds,
        })
    };
    let llama = [("f16", 123.4), ("q8_0", 8.25), ("q4_0", 5.0)];
    let kivi = [("f16", 40.0), ("kivi8", 4.0), ("kivi4", 2.0), ("kivi2", 0.5)];
    let mut measured = Measured::new(shape);
    let lines: String =
        llama.iter().map(|(format, ms)| format!("{}\n", row("cache", format, *ms))).collect();
    measured.add_llama_cpp(&lines).unwrap();
    let rows: Vec<_> = kivi.iter().map(|(format, ms)| row("format", format, *ms)).collect();
    measured.add_kivi(&json!({ "rows": rows }).to_string()).unwrap();
    measured
}

/// Decoding at one depth, where llama.cpp's q8_0 was not measured.
fn generation() -> Measured<Depth> {
    let mut measured = Measured::new(Depth(1024));
    for (format, speed) in [("f16", 50.0), ("q4_0", 80.0)] {
        let row = json!([{
            "n_depth": 1024, "type_k": format, "type_v": format, "samples_ts": [speed],
        }]);
        measured.add_llama_bench(&row.to_string()).unwrap();
    }
    let speeds = [("f16", 55.5), ("kivi8", 60.0), ("kivi4", 90.0), ("kivi2", 100.0)];
    let rows = speeds.map(|(format, speed)| {
        json!({ "depth": 1024, "format": format, "generation_tokens_per_second": speed })
    });
    measured.add_kivi(&json!(rows).to_string()).unwrap();
    measured
}

#[test]
fn tables_have_ratios_above_one_where_kivi2_is_faster() {
    let expected = "\
        | heads | head_dim | tokens | llama.cpp f16 | llama.cpp q8_0 | llama.cpp q4_0 | kivi f16 \
        | kivi8 | kivi4 | kivi2 | kivi2 : llama.cpp f16 | kivi2 : llama.cpp q4_0 |\n\
        |---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n\
        | 9/3 | 64 | 32,768 | 123 | 8.25 | 5.00 | 40.0 | 4.00 | 2.00 | 0.500 | 246.80 | 10.00 |\n";
    assert_eq!(attention_table(&[attention()]), expected);
    let table = generation_table(&[generation()]);
    let row = "| 1,024 | 50.0 | – | 80.0 | 55.5 | 60.0 | 90.0 | 100 | 2.00 | 1.25 |";
    assert_eq!(table.lines().nth(2), Some(row));
}

#[test]
fn the_page_says_what_was_run() {
    let results = Results {
        plan: Plan::new(true, 2, None),
        machine: Machine {
            processor: "Some CPU".to_owned(),
            cores: 4,
            instruction_sets: vec!["avx2", "fma"],
            last_level_cache: 8 << 20,
        },
        model: "/somewhere/model.gguf".into(),
        date: "2026-02-03".to_owned(),
        kivi_version: "0.1.0".to_owned(),
        llama_commit: "0123abc".to_owned(),
        compiler: "c++ 12".to_owned(),
        attention: vec![attention()],
        generation: vec![generation()],
    };
    let page = render(&results);
    for part in [
        "Measured on 2026-02-03.",
        "| processor | Some CPU, 4 cores |",
        "| instruction sets | avx2, fma |",
        "| last-level cache | 8 MiB |",
        "peer-attention --tokens 32768 --heads 9/3 --head-dim 64 --cache f16,q8_0,q4_0 --threads 2 \
         --milliseconds 300 --working-set 33554432\n",
        "kivi bench attention --tokens 32768 --heads 9/3 --head-dim 64 \
         --format f16,kivi8,kivi4,kivi2 --batch 1 --threads 2 --memory-limit 16GiB --seconds 0.3 --json -\n",
        "llama-bench -m model.gguf -t 2 -fa on -ctk q4_0 -ctv q4_0 -p 0 -n 16 -d 1024 -r 1 -o json\n",
        "kivi bench generate --model model.gguf --depth 1024 ",
    ] {
        assert!(page.contains(part), "{part}\nis not in\n{page}");
    }
    assert!(!page.contains("/somewhere"), "paths of this machine are nobody else's business");
}

#[test]
fn numbers() {
    assert_eq!([0.0123, 1.0, 99.94, 100.4].map(significant), ["0.012", "1.00", "99.9", "100"]);
    assert_eq!([0, 999, 4096, 1_048_576].map(grouped), ["0", "999", "4,096", "1,048,576"]);
}
