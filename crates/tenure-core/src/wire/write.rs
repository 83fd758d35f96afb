//! Fields of a line, written without formatting.

use crate::LockToken;

/// Writes the 32 digits of a token. Faster than formatting.
pub fn write_token(out: &mut Vec<u8>, token: LockToken) {
    out.extend_from_slice(&token.to_hex());
}

/// Writes a number in decimal. Faster than formatting.
pub fn write_number(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0_u8; 20];
    let mut begin = digits.len();
    loop {
        begin -= 1;
        digits[begin] = b'0' + u8::try_from(value % 10).expect("a digit");
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[begin..]);
}
