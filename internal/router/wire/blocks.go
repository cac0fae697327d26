package wire

import "github.com/semmoe/operator/internal/jsonscan"

// deepestBlock bounds how deep blocks of content are read in one another: a tool's result in a message, and its blocks.
const deepestBlock = 4

// mediaTypes are the types of blocks that hold images, documents and sounds.
var mediaTypes = map[string]bool{
	`"image"`: true, `"document"`: true, `"input_image"`: true, `"input_file"`: true, `"input_audio"`: true,
}

// promptOfBlocks reads the prompt of a request to Messages or Responses: the instructions, then the texts of all blocks, and the tools. The text
// of the engine's chat template is left out, as for chat completions.
func promptOfBlocks(b Body, instructions, items string) Prompt {
	var read blocks
	read.add(b.get(instructions), 0)
	read.add(b.get(items), 0)
	p := promptOfTexts(read.texts)
	p.Media = read.media
	p.addTools(b.get("tools"))
	return p
}

// blocks are what was read of the content of messages.
type blocks struct {
	texts []string
	media Media
}

// add reads a text, or a list of blocks. Of a message, or an item of a conversation, the members are those of a block.
func (r *blocks) add(content []byte, depth int) {
	if text, ok := jsonscan.String(content); ok {
		r.texts = append(r.texts, text)
		return
	}
	list, ok := jsonscan.Array(content, nil)
	if !ok || depth == deepestBlock {
		return
	}
	for _, at := range list {
		block := content[at.Start:at.End]
		body := ParseBody(block)
		if mediaTypes[string(body.get("type"))] {
			r.media.add(block)
			continue
		}
		for _, name := range []string{"name", "input", "arguments"} { // calls of tools: Messages have an object of arguments, Responses a text
			if text := callText(body.get(name)); text != "" {
				r.texts = append(r.texts, text)
			}
		}
		for _, name := range []string{"text", "content", "output"} {
			r.add(body.get(name), depth+1)
		}
	}
}
