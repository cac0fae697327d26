package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

const snapshotName = "backends.json"

// SaveSnapshot writes the backends to a directory, whole or not at all: a router that is killed while it writes must
// find the old file.
func SaveSnapshot(dir string, backends []Backend) error {
	if err := saveJSON(filepath.Join(dir, snapshotName), backends); err != nil {
		return fmt.Errorf("write endpoint snapshot: %w", err)
	}
	return nil
}

// saveJSON writes a value to a file, whole or not at all.
func saveJSON(path string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(data)
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// LoadSnapshot reads what SaveSnapshot wrote. Without a snapshot it returns no backends and false.
func LoadSnapshot(dir string) ([]Backend, bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, snapshotName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	var backends []Backend
	if err := json.Unmarshal(data, &backends); err != nil {
		return nil, false, fmt.Errorf("endpoint snapshot in %s: %w", dir, err)
	}
	return backends, true, nil
}
