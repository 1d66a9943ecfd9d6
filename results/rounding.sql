-- Pairs of variants of the run that results/rounding.toml describes: requests with equal tokens and equal
-- bits, mean length before the first other token, and |logprob difference| in nats up to it.
with o as (
  select variant, arrangement, request_id, token_digest, payload_id
  from read_parquet('results/rounding/observations/*/*.parquet') where repeat = 0),
p as (select payload_id, token_ids, logprobs from read_parquet('results/rounding/payloads/*.parquet')),
pairs(what, v, arr, w, brr) as (values
  ('batch against solo', 'bfloat16', 'batch', 'bfloat16', 'solo'),
  ('batch against solo, 2 threads', 'bfloat16-threads-2', 'batch', 'bfloat16-threads-2', 'solo'),
  ('1 thread against 2', 'bfloat16', 'batch', 'bfloat16-threads-2', 'batch'),
  ('TP=1 against TP=2', 'bfloat16', 'batch', 'bfloat16-tp2', 'batch'),
  ('float32: batch against solo', 'float32', 'batch', 'float32', 'solo'),
  ('float32: batch against solo, 2 threads', 'float32-threads-2', 'batch', 'float32-threads-2', 'solo'),
  ('float32: 1 thread against 2', 'float32', 'batch', 'float32-threads-2', 'batch'),
  ('float32: TP=1 against TP=2', 'float32', 'batch', 'float32-tp2', 'batch'),
  ('bfloat16 against float32', 'bfloat16', 'batch', 'float32', 'batch')),
m as (
  select what, a.token_digest = b.token_digest as tokens, a.payload_id = b.payload_id as bits,
    coalesce(nullif(list_position(
      list_transform(list_zip(x.token_ids, y.token_ids), lambda t: t[1] <> t[2]), true), 0) - 1,
      len(x.token_ids)) as n,
    x.logprobs as lx, y.logprobs as ly
  from pairs join o a on a.variant = v and a.arrangement = arr
  join o b on b.variant = w and b.arrangement = brr and b.request_id = a.request_id
  join p x on x.payload_id = a.payload_id join p y on y.payload_id = b.payload_id)
select what, count(*) as requests, count(*) filter (where tokens) as tokens,
  count(*) filter (where bits) as bitwise, round(avg(n), 1) as before_flip,
  sum(list_sum(list_transform(list_zip(lx[:n], ly[:n]), lambda t: abs(t[1] - t[2])))) / sum(n) as mean_abs,
  max(list_max(list_transform(list_zip(lx[:n], ly[:n]), lambda t: abs(t[1] - t[2])))) as max_abs
from m group by what order by what
