import { useEffect, useMemo, useState } from 'react';

export function SearchableList({ items, placeholder = 'Search' }) {
  const [query, setQuery] = useState('');
  const [selected, setSelected] = useState(null);

  const visible = useMemo(() => {
    const needle = query.trim().toLowerCase();
    return needle === '' ? items : items.filter((item) => item.label.toLowerCase().includes(needle));
  }, [items, query]);

  useEffect(() => {
    if (selected !== null && !visible.some((item) => item.id === selected)) {
      setSelected(null);
    }
  }, [visible, selected]);

  return (
    <section className="list">
      <input value={query} placeholder={placeholder} onChange={(event) => setQuery(event.target.value)} />
      <ul>
        {visible.map((item) => (
          <li key={item.id} className={item.id === selected ? 'active' : ''} onClick={() => setSelected(item.id)}>
            {item.label}
          </li>
        ))}
      </ul>
      {visible.length === 0 && <p>Nothing matches.</p>}
    </section>
  );
}
