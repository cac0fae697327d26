const fs = require('node:fs/promises');
const http = require('node:http');
const path = require('node:path');

const types = { '.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml' };
const root = path.resolve(process.argv[2] ?? 'public');

const server = http.createServer(async (request, response) => {
  const { pathname } = new URL(request.url, 'http://localhost');
  let file = path.join(root, decodeURIComponent(pathname));
  if (!file.startsWith(root + path.sep) && file !== root + path.sep) {
    response.writeHead(403).end('Forbidden');
    return;
  }
  if (file.endsWith(path.sep)) file += 'index.html';
  try {
    const content = await fs.readFile(file);
    const type = types[path.extname(file)] ?? 'application/octet-stream';
    response.writeHead(200, { 'Content-Type': type, 'Content-Length': content.length });
    response.end(content);
  } catch (error) {
    response.writeHead(error.code === 'ENOENT' ? 404 : 500);
    response.end(error.code);
  }
});

server.listen(8080, () => console.log(`serving ${root} on port 8080`));
