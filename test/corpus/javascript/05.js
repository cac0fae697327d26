/**
 * Parses a query string into an object; repeated names become arrays.
 * @param {string} text such as "?a=1&b=2&a=3"
 * @returns {Record<string, string | string[]>}
 */
export function parseQuery(text) {
  const result = {};
  for (const pair of text.replace(/^\?/, '').split('&')) {
    if (pair === '') continue;
    const [name, value = ''] = pair.split('=', 2).map((part) => decodeURIComponent(part.replace(/\+/g, ' ')));
    if (!(name in result)) {
      result[name] = value;
    } else if (Array.isArray(result[name])) {
      result[name].push(value);
    } else {
      result[name] = [result[name], value];
    }
  }
  return result;
}

export function formatQuery(values) {
  return Object.entries(values)
    .flatMap(([name, value]) => [value].flat().map((v) => `${encodeURIComponent(name)}=${encodeURIComponent(v)}`))
    .join('&');
}
