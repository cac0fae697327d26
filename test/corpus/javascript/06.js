const canvas = document.querySelector('#game');
const context = canvas.getContext('2d');
const ball = { x: 160, y: 120, dx: 140, dy: -95, radius: 8 };
const paddle = { x: 130, y: 225, width: 60, height: 6 };
let score = 0;
let before = performance.now();

canvas.addEventListener('mousemove', (event) => {
  const { left } = canvas.getBoundingClientRect();
  paddle.x = Math.max(0, Math.min(canvas.width - paddle.width, event.clientX - left - paddle.width / 2));
});

function frame(now) {
  const seconds = Math.min((now - before) / 1000, 0.05);
  before = now;
  ball.x += ball.dx * seconds;
  ball.y += ball.dy * seconds;
  if (ball.x < ball.radius || ball.x > canvas.width - ball.radius) ball.dx = -ball.dx;
  if (ball.y < ball.radius) ball.dy = Math.abs(ball.dy);
  const hit = ball.y + ball.radius >= paddle.y && ball.x > paddle.x && ball.x < paddle.x + paddle.width;
  if (hit && ball.dy > 0) {
    ball.dy = -ball.dy * 1.03;
    score += 1;
  }
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillRect(paddle.x, paddle.y, paddle.width, paddle.height);
  context.fillText(`Score ${score}`, 8, 16);
  requestAnimationFrame(frame);
}

requestAnimationFrame(frame);
