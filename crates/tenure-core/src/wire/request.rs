//! Requests: types, parser and writer.

use std::str::FromStr;

use super::field::{Fields, integer, trim};
use super::frame::Lines;
use super::write::{write_number, write_token};
use crate::LockToken;
use crate::table::{KeySpace, Mode};

/// Most seconds of a timeout or a lease.
pub const MAX_SECONDS: u64 = 9_223_372_036;
/// Most slots of a semaphore.
pub const MAX_SEMAPHORE_SLOTS: u32 = 1 << 20;
/// Most milliseconds of a lease of our extension.
const MAX_MILLIS: u64 = MAX_SECONDS * 1000;

/// Request of a client. A lease of `None` is the server's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// `l`, `sl`: claims the key and waits.
    Lock {
        /// Key of the request.
        key: &'a [u8],
        /// Exclusive lock, or a slot of a semaphore.
        mode: Mode,
        /// Seconds to wait; 0 to not wait.
        timeout: u64,
        /// Lease of the grant in seconds.
        lease: Option<u64>,
    },
    /// `e`, `se`: joins the queue. A later `w` redeems the grant.
    Enqueue {
        /// Key of the request.
        key: &'a [u8],
        /// Exclusive lock, or a slot of a semaphore.
        mode: Mode,
        /// Lease of the grant in seconds.
        lease: Option<u64>,
    },
    /// `w`, `sw`: waits for the grant of an earlier `e`.
    Wait {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Seconds to wait; 0 to not wait.
        timeout: u64,
    },
    /// `n`, `sn`: renews a hold.
    Renew {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Proof of the hold; `None` if the text is not a token of this server's form.
        token: Option<LockToken>,
        /// New lease in seconds, from now.
        lease: Option<u64>,
    },
    /// `r`, `sr`: releases a hold.
    Release {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Proof of the hold; `None` if the text is not a token of this server's form.
        token: Option<LockToken>,
    },
    /// `stats`.
    Stats,
    /// `ping`.
    Ping,
    /// `auth`.
    Auth {
        /// Shared secret.
        secret: &'a [u8],
    },
    /// Request that only tenure's server supports.
    Extended(ExtensionRequest<'a>),
}

/// Id of a claim of our extension, chosen by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(pub u128);

/// Requests of our extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtensionRequest<'a> {
    /// `hello`: identifies the client. Enables the other requests of the extension, and pushes by the server.
    Hello {
        /// JSON description of the client.
        about: &'a [u8],
    },
    /// `x`: claims a key without blocking the connection. A later grant is pushed.
    Claim {
        /// Id of the claim.
        id: ClaimId,
        /// Key of the request.
        key: &'a [u8],
        /// Kind of hold.
        mode: Mode,
        /// Lease of the grant in milliseconds.
        lease: u64,
        /// Wait in the queue if the key is held.
        queue: bool,
        /// The hold outlives its connection.
        detached: bool,
        /// Description of the claimant: any text, shown to operators.
        by: &'a [u8],
    },
    /// `xp`: returns the number of waiters before this claim.
    Position {
        /// Id of the claim.
        id: ClaimId,
    },
    /// `xa`: abandons a claim, granted or not.
    Abandon {
        /// Id of the claim.
        id: ClaimId,
    },
    /// `xl`: detaches a granted claim from its connection. It lasts until its lease ends.
    Detach {
        /// Id of the claim.
        id: ClaimId,
    },
    /// `xn`, `sxn`: renews a hold, in milliseconds, and returns the number of waiters.
    Renew {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Proof of the hold.
        token: Option<LockToken>,
        /// New lease in milliseconds, from now.
        lease: u64,
    },
    /// `q`, `sq`: returns the holders and waiters of a key. Needs no `hello`.
    Query {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
    },
    /// `hist`, `shist`: returns the recent events of a key.
    History {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
    },
    /// `ls`, `sls`: lists keys in use that begin with a prefix.
    List {
        /// Prefix of the keys.
        prefix: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Only keys after this key.
        after: Option<&'a [u8]>,
    },
    /// `watch`, `swatch`: subscribes to the next change of a key. One push follows.
    Watch {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Version that the client has seen, as `q` returned it.
        seen: u64,
        /// Id of the watch, chosen by the client.
        id: u64,
    },
    /// `unwatch`: ends a watch.
    Unwatch {
        /// Id of the watch.
        id: u64,
    },
    /// `brk`, `sbrk`: breaks a hold for an operator.
    Break {
        /// Key of the request.
        key: &'a [u8],
        /// Space of the key.
        space: KeySpace,
        /// Fencing number of the hold.
        number: u64,
        /// Reason that the operator gave.
        reason: &'a [u8],
    },
}

/// Malformed request. The connection stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

type Parsed<T> = Result<T, Malformed>;

impl<'a> Request<'a> {
    /// Parses the three lines of a request.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for an unknown command, an invalid key or number, or a wrong number of fields.
    pub fn parse(lines: Lines<'a>) -> Parsed<Self> {
        let Lines { command, key, argument } = lines;
        let mut fields = Fields::of(argument);
        let request = match command {
            b"l" => {
                let timeout = seconds(fields.next(), 0)?;
                Self::Lock { key, mode: Mode::Exclusive, timeout, lease: lease(&mut fields)? }
            }
            b"sl" => {
                let timeout = seconds(fields.next(), 0)?;
                let mode = slot(fields.next())?;
                Self::Lock { key, mode, timeout, lease: lease(&mut fields)? }
            }
            b"e" => Self::Enqueue { key, mode: Mode::Exclusive, lease: lease(&mut fields)? },
            b"se" => {
                let mode = slot(fields.next())?;
                Self::Enqueue { key, mode, lease: lease(&mut fields)? }
            }
            b"w" | b"sw" => {
                Self::Wait { key, space: space(command), timeout: seconds(fields.next(), 0)? }
            }
            b"n" | b"sn" => {
                let token = token(fields.next().ok_or(Malformed)?);
                Self::Renew { key, space: space(command), token, lease: lease(&mut fields)? }
            }
            b"r" | b"sr" => {
                let whole = trim(argument);
                if whole.is_empty() {
                    return Err(Malformed);
                }
                return Ok(Self::Release {
                    key: checked_key(key)?,
                    space: space(command),
                    token: token(whole),
                });
            }
            b"stats" => return Ok(Self::Stats),
            b"ping" => return Ok(Self::Ping),
            b"auth" => return Ok(Self::Auth { secret: trim(argument) }),
            _ => return ExtensionRequest::parse(lines).map(Self::Extended),
        };
        checked_key(key)?;
        if fields.next().is_some() { Err(Malformed) } else { Ok(request) }
    }

    /// Writes the three lines of the request.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Lock { key, mode, timeout, lease } => {
                begin(out, if limit(mode).is_some() { b"sl" } else { b"l" }, key);
                write_number(out, timeout);
                numbers(out, limit(mode).map(u64::from).into_iter().chain(lease));
            }
            Self::Enqueue { key, mode, lease } => {
                begin(out, if limit(mode).is_some() { b"se" } else { b"e" }, key);
                numbers(out, limit(mode).map(u64::from).into_iter().chain(lease));
            }
            Self::Wait { key, space, timeout } => {
                begin(out, command_for(space, b"w", b"sw"), key);
                write_number(out, timeout);
            }
            Self::Renew { key, space, token, lease } => {
                begin(out, command_for(space, b"n", b"sn"), key);
                write_proof(out, token);
                numbers(out, lease);
            }
            Self::Release { key, space, token } => {
                begin(out, command_for(space, b"r", b"sr"), key);
                write_proof(out, token);
            }
            Self::Stats => begin(out, b"stats", b"_"),
            Self::Ping => begin(out, b"ping", b"_"),
            Self::Auth { secret } => {
                begin(out, b"auth", b"_");
                out.extend_from_slice(secret);
            }
            Self::Extended(extended) => extended.write(out),
        }
        out.push(b'\n');
    }
}

impl<'a> ExtensionRequest<'a> {
    fn parse(lines: Lines<'a>) -> Parsed<Self> {
        let Lines { command, key, argument } = lines;
        let mut fields = Fields::of(argument);
        let parsed = match command {
            b"hello" => return Ok(Self::Hello { about: trim(argument) }),
            b"x" => return Self::parse_claim(key, fields),
            b"xp" => Self::Position { id: claim(fields.next())? },
            b"xa" => Self::Abandon { id: claim(fields.next())? },
            b"xl" => Self::Detach { id: claim(fields.next())? },
            b"xn" | b"sxn" => {
                let token = token(fields.next().ok_or(Malformed)?);
                let lease = bounded(fields.next(), 1, MAX_MILLIS)?;
                Self::Renew { key: checked_key(key)?, space: space(command), token, lease }
            }
            b"q" | b"sq" => {
                return Ok(Self::Query { key: checked_key(key)?, space: space(command) });
            }
            b"hist" | b"shist" => {
                return Ok(Self::History { key: checked_key(key)?, space: space(command) });
            }
            b"ls" | b"sls" => {
                let after = (!argument.is_empty()).then_some(argument);
                return Ok(Self::List { prefix: key, space: space(command), after });
            }
            b"watch" | b"swatch" => {
                let (seen, id) = (number(fields.next())?, number(fields.next())?);
                Self::Watch { key: checked_key(key)?, space: space(command), seen, id }
            }
            b"unwatch" => Self::Unwatch { id: number(fields.next())? },
            b"brk" | b"sbrk" => {
                let number = number(fields.next())?;
                return Ok(Self::Break {
                    key: checked_key(key)?,
                    space: space(command),
                    number,
                    reason: fields.rest(),
                });
            }
            _ => return Err(Malformed),
        };
        if fields.next().is_some() { Err(Malformed) } else { Ok(parsed) }
    }

    fn parse_claim(key: &'a [u8], mut fields: Fields<'a>) -> Parsed<Self> {
        let id = claim(fields.next())?;
        let mode = match fields.next().ok_or(Malformed)? {
            b"x" => Mode::Exclusive,
            b"s" => Mode::Shared,
            limit => slot(Some(limit))?,
        };
        let lease = bounded(fields.next(), 1, MAX_MILLIS)?;
        let queue = either(fields.next(), b"try", b"queue")?;
        let detached = either(fields.next(), b"bound", b"detached")?;
        let by = fields.rest();
        Ok(Self::Claim { id, key: checked_key(key)?, mode, lease, queue, detached, by })
    }

    fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Hello { about } => {
                begin(out, b"hello", b"_");
                out.extend_from_slice(about);
            }
            Self::Claim { id, key, mode, lease, queue, detached, by } => {
                begin(out, b"x", key);
                write_claim(out, id);
                out.push(b' ');
                match mode {
                    Mode::Exclusive => out.push(b'x'),
                    Mode::Shared => out.push(b's'),
                    Mode::Slot { limit } => write_number(out, u64::from(limit)),
                }
                numbers(out, Some(lease));
                out.extend_from_slice(if queue { b" queue" } else { b" try" });
                out.extend_from_slice(if detached { b" detached " } else { b" bound " });
                out.extend_from_slice(by);
            }
            Self::Position { id } => {
                begin(out, b"xp", b"_");
                write_claim(out, id);
            }
            Self::Abandon { id } => {
                begin(out, b"xa", b"_");
                write_claim(out, id);
            }
            Self::Detach { id } => {
                begin(out, b"xl", b"_");
                write_claim(out, id);
            }
            Self::Renew { key, space, token, lease } => {
                begin(out, command_for(space, b"xn", b"sxn"), key);
                write_proof(out, token);
                numbers(out, Some(lease));
            }
            Self::Query { key, space } => begin(out, command_for(space, b"q", b"sq"), key),
            Self::History { key, space } => begin(out, command_for(space, b"hist", b"shist"), key),
            Self::List { prefix, space, after } => {
                begin(out, command_for(space, b"ls", b"sls"), prefix);
                out.extend_from_slice(after.unwrap_or_default());
            }
            Self::Watch { key, space, seen, id } => {
                begin(out, command_for(space, b"watch", b"swatch"), key);
                write_number(out, seen);
                numbers(out, Some(id));
            }
            Self::Unwatch { id } => {
                begin(out, b"unwatch", b"_");
                write_number(out, id);
            }
            Self::Break { key, space, number, reason } => {
                begin(out, command_for(space, b"brk", b"sbrk"), key);
                write_number(out, number);
                out.push(b' ');
                out.extend_from_slice(reason);
            }
        }
    }
}

/// Key space of a command. An initial `s` stands for semaphores. `stats`, which has no key, is matched before.
fn space(command: &[u8]) -> KeySpace {
    if command.starts_with(b"s") { KeySpace::Semaphore } else { KeySpace::Lock }
}

fn command_for<'a>(space: KeySpace, lock: &'a [u8], semaphore: &'a [u8]) -> &'a [u8] {
    match space {
        KeySpace::Lock => lock,
        KeySpace::Semaphore => semaphore,
    }
}

fn checked_key(key: &[u8]) -> Parsed<&[u8]> {
    let bad = key.is_empty() || key.iter().any(|byte| matches!(byte, b' ' | b'\t' | b'\r'));
    if bad { Err(Malformed) } else { Ok(key) }
}

fn bounded(field: Option<&[u8]>, min: u64, max: u64) -> Parsed<u64> {
    let value = field.and_then(integer).and_then(|value| u64::try_from(value).ok());
    value.filter(|value| (min..=max).contains(value)).ok_or(Malformed)
}

fn seconds(field: Option<&[u8]>, min: u64) -> Parsed<u64> {
    bounded(field, min, MAX_SECONDS)
}

/// Parses an unsigned 64-bit number, such as a fencing number.
fn number(field: Option<&[u8]>) -> Parsed<u64> {
    let text = field.filter(|field| field.first().is_some_and(u8::is_ascii_digit));
    let text = text.and_then(|field| str::from_utf8(field).ok());
    text.and_then(|text| text.parse().ok()).ok_or(Malformed)
}

fn lease(fields: &mut Fields<'_>) -> Parsed<Option<u64>> {
    fields.next().map(|field| seconds(Some(field), 1)).transpose()
}

fn slot(field: Option<&[u8]>) -> Parsed<Mode> {
    let limit = bounded(field, 1, u64::from(MAX_SEMAPHORE_SLOTS))?;
    Ok(Mode::Slot { limit: u32::try_from(limit).map_err(|_| Malformed)? })
}

fn limit(mode: Mode) -> Option<u32> {
    match mode {
        Mode::Slot { limit } => Some(limit),
        Mode::Exclusive | Mode::Shared => None,
    }
}

fn token(field: &[u8]) -> Option<LockToken> {
    LockToken::from_hex(field)
}

fn claim(field: Option<&[u8]>) -> Parsed<ClaimId> {
    let text = field.filter(|field| field.len() == 32).and_then(|field| str::from_utf8(field).ok());
    let id = text.filter(|text| !text.starts_with('+'));
    id.and_then(|text| u128::from_str_radix(text, 16).ok()).map(ClaimId).ok_or(Malformed)
}

fn either(field: Option<&[u8]>, no: &[u8], yes: &[u8]) -> Parsed<bool> {
    match field {
        Some(field) if field == no => Ok(false),
        Some(field) if field == yes => Ok(true),
        _ => Err(Malformed),
    }
}

fn begin(out: &mut Vec<u8>, command: &[u8], key: &[u8]) {
    out.extend_from_slice(command);
    out.push(b'\n');
    out.extend_from_slice(key);
    out.push(b'\n');
}

/// Writes numeric fields of an argument. The first field of a line has no blank before it.
fn numbers(out: &mut Vec<u8>, values: impl IntoIterator<Item = u64>) {
    for value in values {
        if out.last() != Some(&b'\n') {
            out.push(b' ');
        }
        write_number(out, value);
    }
}

fn write_proof(out: &mut Vec<u8>, token: Option<LockToken>) {
    match token {
        Some(token) => write_token(out, token),
        None => out.push(b'-'),
    }
}

fn write_claim(out: &mut Vec<u8>, ClaimId(id): ClaimId) {
    out.extend_from_slice(format!("{id:032x}").as_bytes());
}

impl FromStr for ClaimId {
    type Err = Malformed;

    fn from_str(text: &str) -> Parsed<Self> {
        claim(Some(text.as_bytes()))
    }
}
