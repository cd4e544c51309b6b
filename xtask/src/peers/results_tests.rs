use super::*;

const SHAPE: Shape = Shape { tokens: 1024, query_heads: 32, kv_heads: 8, head_dim: 128 };

fn attention_row(format_name: &str, format: &str, milliseconds: f64) -> Value {
    let Shape { tokens, query_heads, kv_heads, head_dim } = SHAPE;
    json!({
        "tokens": tokens, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim,
        format_name: format, "milliseconds": milliseconds, "bytes": 7, "bytes_read": 9,
    })
}

/// One line per format, as `tools/peers/attention.cpp` prints them.
fn llama_lines(milliseconds: [f64; 3]) -> String {
    let rows = ["f16", "q8_0", "q4_0"].into_iter().zip(milliseconds);
    rows.map(|(format, ms)| format!("{}\n", attention_row("cache", format, ms))).collect()
}

/// One object, in another order than the tables.
fn kivi_object(milliseconds: [f64; 4]) -> String {
    let rows = ["f16", "kivi2", "kivi4", "kivi8"].into_iter().zip(milliseconds);
    let rows: Vec<Value> = rows.map(|(format, ms)| attention_row("format", format, ms)).collect();
    json!({ "threads": 2, "rows": rows }).to_string()
}

fn message(result: Result<(), Problem>) -> String {
    match result {
        Err(Problem::Failed(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn reads_attention_of_both_programs() {
    let mut measured = Measured::new(SHAPE);
    measured.add_llama_cpp(&llama_lines([4.0, 3.0, 5.0])).unwrap();
    measured.add_kivi(&kivi_object([2.0, 0.5, 1.0, 1.5])).unwrap();
    measured.add_kivi(&kivi_object([4.0, 0.75, 1.0, 1.5])).unwrap();
    measured.add_llama_cpp(&llama_lines([6.0, 3.0, 5.0])).unwrap();
    measured.add_llama_cpp(&llama_lines([5.5, 3.0, 5.0])).unwrap();
    let medians: Vec<f64> = (0..7).map(|index| measured.median(index).unwrap()).collect();
    // Of three the middle one, of two the mean.
    assert_eq!(medians, [5.5, 3.0, 5.0, 3.0, 1.5, 1.0, 0.625]);

    let rows = measured.to_json();
    assert_eq!(rows.len(), 7);
    let expected = json!({
        "tokens": 1024, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "program": "kivi",
        "format": "kivi2", "milliseconds": 0.625, "samples": [0.5, 0.75], "bytes": 9,
    });
    assert_eq!(rows[6], expected);
    assert_eq!(rows[0]["bytes"], 7);
}

#[test]
fn refuses_attention_that_was_not_asked_for() {
    let mut measured = Measured::new(SHAPE);
    let other = kivi_object([1.0; 4]).replace("1024", "4096");
    assert!(message(measured.add_kivi(&other)).contains("asked for"));
    let two = llama_lines([1.0; 3]).lines().take(2).collect::<Vec<_>>().join("\n");
    assert!(message(measured.add_llama_cpp(&two)).contains("q4_0"));
    let twice = llama_lines([1.0; 3]) + &llama_lines([1.0; 3]);
    assert!(message(measured.add_llama_cpp(&twice)).contains("instead of"));
    assert!(message(measured.add_llama_cpp("")).contains("instead of"));
    assert!(message(measured.add_llama_cpp("error")).contains("no JSON"));
    assert!(message(measured.add_kivi("{\"threads\": 2}")).contains("no list of rows"));
    assert!(message(measured.add_kivi(&kivi_object([0.0; 4]))).contains("a measurement of 0"));
    let skipped = kivi_object([1.0; 4]).replace("milliseconds", "needed");
    assert!(message(measured.add_kivi(&skipped)).contains("no number milliseconds"));
    assert_eq!(Measured::new(SHAPE).to_json(), Vec::<Value>::new());
}

/// The keys of llama-bench's objects that count here.
fn llama_bench(type_v: &str, speed: f64) -> String {
    json!([{
        "build_commit": "0123abc", "n_depth": 4096, "n_gen": 32, "type_k": "q8_0",
        "type_v": type_v, "test_time": "2026-02-03T04:05:06Z", "avg_ts": 1.0, "samples_ts": [speed, 1.0, speed + 1.0],
    }])
    .to_string()
}

#[test]
fn reads_decoding_of_both_programs() {
    let mut measured = Measured::new(Depth(4096));
    let run = measured.add_llama_bench(&llama_bench("q8_0", 25.0)).unwrap();
    let expected = Run { time: "2026-02-03T04:05:06Z".to_owned(), commit: "0123abc".to_owned() };
    assert_eq!(run, expected);
    let row = |format: &str, speed: f64| json!({ "depth": 4096, "batch": 1, "format": format, "generation_tokens_per_second": speed });
    let rows = [row("kivi2", 40.0), row("f16", 20.0), row("kivi4", 30.0), row("kivi8", 28.0)];
    measured.add_kivi(&json!(rows).to_string()).unwrap();
    let medians: Vec<Option<f64>> = (0..7).map(|index| measured.median(index)).collect();
    let expected = [None, Some(25.0), None, Some(20.0), Some(28.0), Some(30.0), Some(40.0)];
    assert_eq!(medians, expected);
    assert_eq!(measured.to_json()[0]["tokens_per_second"], 25.0);
}

#[test]
fn refuses_decoding_that_was_not_asked_for() {
    let result = Measured::new(Depth(4096)).add_llama_bench(&llama_bench("f16", 25.0));
    assert!(message(result.map(|_| ())).contains("something else"));
    let result = Measured::new(Depth(0)).add_llama_bench(&llama_bench("q8_0", 25.0));
    assert!(message(result.map(|_| ())).contains("something else"));
    let result = Measured::new(Depth(0)).add_llama_bench("[]");
    assert!(message(result.map(|_| ())).contains("0 results"));
    let rows = formats(KIVI).map(|format| json!({ "depth": 1024, "format": format }));
    let rows = Value::Array(rows.collect()).to_string();
    assert!(message(Measured::new(Depth(0)).add_kivi(&rows)).contains("asked for Depth(0)"));
}
