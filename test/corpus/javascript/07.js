import { createStore } from './store.js';

const initial = { items: [], filter: 'all', error: null };

function reducer(state = initial, action) {
  switch (action.type) {
    case 'added':
      return { ...state, items: [...state.items, { id: action.id, text: action.text, done: false }] };
    case 'toggled':
      return { ...state, items: state.items.map((item) => (item.id === action.id ? { ...item, done: !item.done } : item)) };
    case 'removed':
      return { ...state, items: state.items.filter((item) => item.id !== action.id) };
    case 'filtered':
      return { ...state, filter: action.filter };
    case 'failed':
      return { ...state, error: action.message };
    default:
      return state;
  }
}

export const store = createStore(reducer);

export function visibleItems({ items, filter }) {
  if (filter === 'open') return items.filter((item) => !item.done);
  if (filter === 'done') return items.filter((item) => item.done);
  return items;
}
