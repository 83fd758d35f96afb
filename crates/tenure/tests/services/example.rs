// An expression, which the examples of the crate's documentation include: the value of a variable that names a service.
// Without it the example is skipped, unless `TENURE_TEST_SERVICES=required`: then it fails. As in `mod.rs`, but without
// other files, since the archive of the crate has none.
|variable: &str| -> Option<String> {
    let value = std::env::var(variable).ok().filter(|value| !value.is_empty());
    if value.is_none() {
        let required = std::env::var("TENURE_TEST_SERVICES").is_ok_and(|value| value == "required");
        assert!(!required, "{variable} is not set, and TENURE_TEST_SERVICES=required");
        let line = format!("an example: {variable} is not set (cargo xtask test sets it)\n");
        eprint!("skipped: {line}");
        if let Some(skips) = std::env::var_os("TENURE_TEST_SKIPS") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(skips);
            let mut file = file.expect("a file of skipped tests");
            std::io::Write::write_all(&mut file, line.as_bytes()).expect("it is recorded");
        }
    }
    value
}
