/** Line icons, 20 × 20, drawn in the colour of the text around them. */

const PATHS = {
  menu: "M3 6h14M3 10h14M3 14h14",
  plus: "M10 4v12M4 10h12",
  close: "M5 5l10 10M15 5L5 15",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  copy: "M7 7h9v9H7zM4 13V4h9",
  check: "M4 10.5l4 4 8-9",
  redo: "M16 10a6 6 0 1 1-2-4.5M16 3v4h-4",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11.5 5.5l3 3",
  trash: "M4 6h12M8 6V4h4v2M6 6l1 11h6l1-11",
  settings:
    "M3 6h8M15 6h2M3 14h2M9 14h8M13 6m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M7 14m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  download: "M10 3v10M6 9.5l4 4 4-4M4 17h12",
  chip: "M6 6h8v8H6zM8 3v3M12 3v3M8 14v3M12 14v3M3 8h3M3 12h3M14 8h3M14 12h3",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { readonly name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 20 20" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface IconButtonProps {
  readonly icon: IconName;
  readonly label: string;
  readonly onClick: () => void;
  readonly disabled?: boolean;
}

export function IconButton({ icon, label, onClick, disabled = false }: IconButtonProps) {
  return (
    <button
      type="button"
      class="icon-button"
      aria-label={label}
      title={label}
      onClick={onClick}
      disabled={disabled}
    >
      <Icon name={icon} />
    </button>
  );
}
