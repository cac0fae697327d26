import { describe, expect, it, vi } from 'vitest';
import { retry } from './retry.js';

describe('retry', () => {
  it('returns the first result', async () => {
    const work = vi.fn().mockResolvedValue('done');
    await expect(retry(work, { attempts: 3 })).resolves.toBe('done');
    expect(work).toHaveBeenCalledTimes(1);
  });

  it('tries again after a failure', async () => {
    const work = vi.fn().mockRejectedValueOnce(new Error('busy')).mockResolvedValue(7);
    await expect(retry(work, { attempts: 2, delay: 0 })).resolves.toBe(7);
    expect(work).toHaveBeenCalledTimes(2);
  });

  it('gives up with the last error', async () => {
    const work = vi.fn().mockRejectedValue(new Error('gone'));
    await expect(retry(work, { attempts: 4, delay: 0 })).rejects.toThrow('gone');
    expect(work).toHaveBeenCalledTimes(4);
  });

  it('refuses a negative number of attempts', () => {
    expect(() => retry(() => {}, { attempts: -1 })).toThrow(RangeError);
  });
});
